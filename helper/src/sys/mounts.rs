//! Builds a command's view of the file system in its own mount namespace, with the mount calls of Linux 5.12 and later: no path is looked up twice, and no
//! other program is executed.
use std::ffi::{CStr, CString, c_char};
use std::ptr;

use libc::{c_int, c_long};

use super::namespaces::Part;
use super::region::Region;

/// One mount of a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Mount {
    /// What is at the first path is writable at the second one, with everything mounted below it.
    Writable(CString, CString),
    /// Memory of the command's own.
    SharedMemory(CString),
}

/// What a command's file system looks like. `/proc` is always a fresh one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Everything is read-only but what `mounts` makes writable.
    pub(crate) read_only: bool,
    /// In this order: later ones lie over earlier ones.
    pub(crate) mounts: Vec<Mount>,
}

/// A mount in the form that needs no allocation.
#[repr(C)]
#[derive(Clone, Copy)]
struct WrittenMount {
    /// Null for new memory.
    source: *const c_char,
    target: *const c_char,
    /// The copy of the source, while it is not in its place.
    tree: c_int,
}

/// A layout in that form.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct WrittenLayout {
    read_only: bool,
    mounts: *mut WrittenMount,
    count: usize,
}

impl Layout {
    /// Copies the layout into shared memory; none when there is no room.
    pub(super) fn write(&self, region: &mut Region) -> Option<*mut WrittenLayout> {
        let mut mounts = Vec::with_capacity(self.mounts.len());
        for mount in &self.mounts {
            let (source, target) = match mount {
                Mount::Writable(source, target) => (region.place_string(source)?, target),
                Mount::SharedMemory(target) => (ptr::null(), target),
            };
            mounts.push(WrittenMount {
                source,
                target: region.place_string(target)?,
                tree: -1,
            });
        }
        let written = WrittenLayout {
            read_only: self.read_only,
            mounts: region.place(mounts.as_ptr(), mounts.len())?,
            count: mounts.len(),
        };
        region.place(&raw const written, 1)
    }
}

/// Builds the view. An error is the part that was refused; its errno stands.
///
/// # Safety
/// Only in the first process of new namespaces, which shares `layout` with the helper that wrote it and does nothing else with it meanwhile.
pub(super) unsafe fn build(layout: *mut WrittenLayout) -> Result<(), Part> {
    // SAFETY: as the caller says; the mounts lie in the same shared memory.
    let (layout, mounts) = unsafe {
        let layout = &*layout;
        (layout, std::slice::from_raw_parts_mut(layout.mounts, layout.count))
    };
    // SAFETY: numbers, literals, and strings of the layout.
    unsafe {
        // Before the root becomes read-only, or the copies would be read-only too.
        for mount in &mut *mounts {
            if !mount.source.is_null() {
                let tree = libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, mount.source, OPEN_TREE);
                mount.tree = check(tree, Part::WritableTree)?;
            }
        }
        check(change_root(layout.read_only), Part::ReadOnlyRoot)?;
        check(new_mount(c"proc", &[], c"/proc".as_ptr()), Part::Proc)?;
        for mount in &*mounts {
            if mount.source.is_null() {
                let made = new_mount(c"tmpfs", &[(c"mode", c"1777")], mount.target);
                check(made, Part::SharedMemory)?;
            } else {
                check(place(mount.tree, mount.target), Part::WritableMount)?;
            }
        }
        // A file without a name: would leave nothing behind if it were made.
        let refused = !layout.read_only
            || (libc::open(c"/".as_ptr(), libc::O_TMPFILE | libc::O_WRONLY | libc::O_CLOEXEC, 0o600) == -1
                && *libc::__errno_location() == libc::EROFS);
        if !refused || libc::getpid() != 1 {
            *libc::__errno_location() = 0;
            return Err(Part::SelfCheck);
        }
    }
    Ok(())
}

fn check(result: c_long, part: Part) -> Result<c_int, Part> {
    c_int::try_from(result).ok().filter(|value| *value >= 0).ok_or(part)
}

/// A copy of a tree of mounts, with what is mounted below it: without that a user namespace may not copy.
const OPEN_TREE: u32 = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC | libc::AT_RECURSIVE as u32;

/// Every mount read-only when asked for, and none of them told of later ones outside.
///
/// # Safety
/// As for [`build`].
unsafe fn change_root(read_only: bool) -> c_long {
    let attributes = libc::mount_attr {
        attr_set: if read_only { libc::MOUNT_ATTR_RDONLY } else { 0 },
        attr_clr: 0,
        propagation: libc::MS_PRIVATE,
        userns_fd: 0,
    };
    // SAFETY: the structure outlives the call and has the given size.
    unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            c"/".as_ptr(),
            libc::AT_RECURSIVE,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    }
}

/// Puts a detached mount over `target`.
///
/// # Safety
/// As for [`build`]; `target` is a terminated string.
unsafe fn place(mount: c_int, target: *const c_char) -> c_long {
    // SAFETY: numbers and terminated strings.
    unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount,
            c"".as_ptr(),
            libc::AT_FDCWD,
            target,
            libc::MOVE_MOUNT_F_EMPTY_PATH,
        )
    }
}

/// Mounts a new file system over `target`.
///
/// # Safety
/// As for [`place`].
unsafe fn new_mount(kind: &CStr, options: &[(&CStr, &CStr)], target: *const c_char) -> c_long {
    const CLOEXEC: c_int = 1;
    const SET_STRING: c_int = 1;
    const CREATE: c_int = 6;
    const NOTHING: *const c_char = ptr::null();
    let attributes = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC | libc::MOUNT_ATTR_NODEV;
    // SAFETY: numbers, terminated strings, and null where the kernel expects none.
    unsafe {
        let context = libc::syscall(libc::SYS_fsopen, kind.as_ptr(), CLOEXEC);
        if context < 0 {
            return context;
        }
        for (key, value) in options {
            let set = libc::syscall(libc::SYS_fsconfig, context, SET_STRING, key.as_ptr(), value.as_ptr(), 0);
            if set < 0 {
                return set;
            }
        }
        let created = libc::syscall(libc::SYS_fsconfig, context, CREATE, NOTHING, NOTHING, 0);
        if created < 0 {
            return created;
        }
        match c_int::try_from(libc::syscall(libc::SYS_fsmount, context, CLOEXEC, attributes)) {
            Ok(mounted) if mounted >= 0 => place(mounted, target),
            _ => -1,
        }
    }
}
