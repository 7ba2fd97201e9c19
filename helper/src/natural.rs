//! Would a call that the policy refuses have failed anyway, for this user without a sandbox? Then the kernel's own error stands, and there is no fact.
//!
//! The helper has exactly the command's rights to files (same ids, no capabilities), so it can ask the kernel about itself. Only refused calls get here.
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Access, AtFlags, CWD, Dir, FileType, Mode, OFlags, StatxFlags, openat, statx};
use rustix::io::Errno;

use crate::object::{Found, own_path};
use crate::world::outside;

/// The error, if the object cannot be accessed like this. A mount that is read-only for the command alone is the sandbox's doing and no ordinary failure.
pub(crate) fn access(object: impl AsFd, wanted: Access) -> Option<Errno> {
    let ask = |object: BorrowedFd<'_>| rustix::fs::accessat(CWD, own_path(object), wanted, AtFlags::empty()).err();
    match ask(object.as_fd()) {
        Some(Errno::ROFS) => ask(outside(object.as_fd())?.as_fd()),
        other => other,
    }
}

/// The error, if no name can be made in the folder of `found`, or the name is taken.
pub(crate) fn create(found: &Found, is_folder: bool) -> Option<Errno> {
    if found.object.is_some() {
        return Some(Errno::EXIST);
    }
    if found.trailing_slash && !is_folder {
        return Some(Errno::NOENT);
    }
    folder_of(found)
}

/// The error, if the folder that holds the name does not let this user change names.
fn folder_of(found: &Found) -> Option<Errno> {
    match &found.parent {
        Some(parent) => access(parent, Access::WRITE_OK | Access::EXEC_OK),
        // `.`, `..` and `/` are never made or removed.
        None => Some(Errno::BUSY),
    }
}

/// The error, if the name cannot be removed. `folder` says what the call expects it to be; none accepts both (rename).
pub(crate) fn remove(found: &Found, folder: Option<bool>) -> Option<Errno> {
    let Some(object) = &found.object else {
        return Some(Errno::NOENT);
    };
    let Ok(stat) = rustix::fs::fstat(object) else {
        return Some(Errno::NOENT);
    };
    let is_folder = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    match folder {
        Some(true) if !is_folder => return Some(Errno::NOTDIR),
        Some(false) if is_folder => return Some(Errno::ISDIR),
        None if found.trailing_slash && !is_folder => return Some(Errno::NOTDIR),
        _ => {}
    }
    if let Some(errno) = folder_of(found) {
        return Some(errno);
    }
    let own = rustix::process::geteuid().as_raw();
    let sticky = found
        .parent
        .as_ref()
        .and_then(|parent| rustix::fs::fstat(parent).ok())
        .is_some_and(|parent| parent.st_mode & libc::S_ISVTX != 0 && parent.st_uid != own && stat.st_uid != own);
    if sticky || is_fixed(object) {
        return Some(Errno::PERM);
    }
    (folder == Some(true) && has_entries(object)).then_some(Errno::NOTEMPTY)
}

/// The error, if `old` cannot take the place of `new`.
pub(crate) fn rename(old: &Found, new: &Found, flags: u32) -> Option<Errno> {
    remove(old, None)
        .or_else(|| match &new.object {
            Some(_) if flags & libc::RENAME_NOREPLACE != 0 => Some(Errno::EXIST),
            None if flags & libc::RENAME_EXCHANGE != 0 => Some(Errno::NOENT),
            Some(_) => remove(new, None),
            None => folder_of(new),
        })
        .or_else(|| other_device(old.object.as_ref()?, new))
}

/// The error, if `new` cannot become another name of `old`.
pub(crate) fn link(old: &Found, new: &Found) -> Option<Errno> {
    let Some(object) = &old.object else {
        return Some(Errno::NOENT);
    };
    let Ok(stat) = rustix::fs::fstat(object) else {
        return Some(Errno::NOENT);
    };
    let kind = FileType::from_raw_mode(stat.st_mode);
    create(new, false).or_else(|| other_device(object, new)).or_else(|| {
        let owner = stat.st_uid == rustix::process::geteuid().as_raw();
        let plain = kind == FileType::RegularFile && stat.st_mode & libc::S_ISUID == 0;
        // fs.protected_hardlinks, the default everywhere, asks for this.
        let allowed = owner || (plain && access(object, Access::READ_OK | Access::WRITE_OK).is_none());
        (kind == FileType::Directory || !allowed || is_fixed(object)).then_some(Errno::PERM)
    })
}

fn other_device(object: &OwnedFd, new: &Found) -> Option<Errno> {
    let device = |fd: &OwnedFd| rustix::fs::fstat(fd).ok().map(|stat| stat.st_dev);
    (device(object)? != device(new.parent.as_ref()?)?).then_some(Errno::XDEV)
}

/// The error, if a call that only the owner may make is made by another user, or the object cannot be changed at all.
pub(crate) fn owner_only(object: &OwnedFd) -> Option<Errno> {
    let Ok(stat) = rustix::fs::fstat(object) else {
        return Some(Errno::NOENT);
    };
    if access(object, Access::WRITE_OK) == Some(Errno::ROFS) {
        return Some(Errno::ROFS);
    }
    (stat.st_uid != rustix::process::geteuid().as_raw() || is_fixed(object)).then_some(Errno::PERM)
}

/// Immutable or append-only.
fn is_fixed(object: &OwnedFd) -> bool {
    const FIXED: u64 = 0x10 | 0x20;
    statx(object, "", AtFlags::EMPTY_PATH, StatxFlags::empty())
        .is_ok_and(|found| found.stx_attributes.bits() & FIXED != 0)
}

fn has_entries(folder: &OwnedFd) -> bool {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(readable) = openat(CWD, own_path(folder.as_fd()), flags, Mode::empty()) else {
        return false;
    };
    Dir::new(readable).is_ok_and(|entries| {
        entries
            .flatten()
            .any(|entry| entry.file_name() != c"." && entry.file_name() != c"..")
    })
}
