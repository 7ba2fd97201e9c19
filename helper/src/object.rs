//! From the words of a call to the object that it means: paths resolved as the calling thread would, pinned, with their canonical name.
//!
//! The kernel does nearly all of the walking (`openat2`), below the command's root. What it would do in the supervisor's own name is done here instead:
//! `/proc/self`, `/proc/thread-self` and the magic links below them (`/dev/stdout` leads through one).
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxAttributes, StatxFlags, openat, openat2, statx,
};
use rustix::io::Errno;

use crate::sys;
use crate::world::World;

/// Symbolic links followed before a path counts as a loop, as in the kernel.
const MAX_LINKS: u32 = 40;
const PATH_MAX: usize = 4096;
const PROC_ROOT_INODE: u64 = 1;
const PIN: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// How the last component is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Last {
    /// A symbolic link there is followed.
    Follow,
    /// It is not; a trailing slash still follows it.
    NoFollow,
    /// The call is about the name itself (create, remove, rename).
    Name,
}

/// What a path leads to.
#[derive(Debug)]
pub(crate) struct Found {
    /// Canonical name; of a missing object, the name that it would get.
    pub(crate) path: Vec<u8>,
    /// The object, pinned; none when it does not exist.
    pub(crate) object: Option<OwnedFd>,
    /// The folder that holds the name, when the path ended in one.
    pub(crate) parent: Option<OwnedFd>,
    /// The path ended in a slash.
    pub(crate) trailing_slash: bool,
}

/// The file system as one thread sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'w> {
    /// The thread that made the call, as the supervisor sees it.
    pub(crate) thread: i32,
    /// Where it runs.
    pub(crate) world: &'w World,
}

enum Link {
    Text(Vec<u8>),
    Object(OwnedFd),
}

impl View<'_> {
    /// A C string of the thread's memory, at most [`PATH_MAX`] with its end.
    pub(crate) fn text(self, address: u64) -> Result<Vec<u8>, Errno> {
        let mut text = Vec::new();
        let mut buffer = [0u8; 512];
        while text.len() < PATH_MAX {
            let at = address.wrapping_add(text.len() as u64);
            // Never across a page: the next one may not be there, and a partial read would hide the end of the string.
            let chunk = (PATH_MAX - (at as usize % PATH_MAX)).min(buffer.len());
            let read = sys::read_memory(self.thread, at, &mut buffer[..chunk]).map_err(errno)?;
            if read == 0 {
                return Err(Errno::FAULT);
            }
            if let Some(end) = buffer[..read].iter().position(|byte| *byte == 0) {
                text.extend_from_slice(&buffer[..end]);
                return Ok(text);
            }
            text.extend_from_slice(&buffer[..read]);
        }
        Err(Errno::NAMETOOLONG)
    }

    /// Exactly `buffer.len()` bytes of the thread's memory.
    pub(crate) fn bytes(self, address: u64, buffer: &mut [u8]) -> Result<(), Errno> {
        match sys::read_memory(self.thread, address, buffer) {
            Ok(read) if read == buffer.len() => Ok(()),
            Ok(_) => Err(Errno::FAULT),
            Err(error) => Err(errno(error)),
        }
    }

    /// The object behind one of the thread's descriptors, or its working directory.
    pub(crate) fn descriptor(self, fd: i32) -> Result<OwnedFd, Errno> {
        if fd == libc::AT_FDCWD {
            return openat(CWD, format!("/proc/{}/cwd", self.thread), PIN, Mode::empty());
        }
        openat(CWD, format!("/proc/{}/fd/{fd}", self.thread), PIN, Mode::empty()).map_err(|errno| match errno {
            Errno::NOENT => Errno::BADF,
            other => other,
        })
    }

    /// Flags with which one of the thread's descriptors was opened.
    pub(crate) fn descriptor_flags(self, fd: i32) -> Option<u32> {
        let text = crate::tree::read_start(&format!("/proc/{}/fdinfo/{fd}", self.thread), 256);
        let line = text
            .split(|byte| *byte == b'\n')
            .find_map(|line| line.strip_prefix(b"flags:"))?;
        u32::from_str_radix(std::str::from_utf8(line).ok()?.trim(), 8).ok()
    }

    /// The name of one of the thread's descriptors, or of its working directory, as text only.
    pub(crate) fn descriptor_name(self, fd: i32) -> Option<Vec<u8>> {
        let link = match fd {
            libc::AT_FDCWD => format!("/proc/{}/cwd", self.thread),
            fd => format!("/proc/{}/fd/{fd}", self.thread),
        };
        Some(rustix::fs::readlink(link, Vec::new()).ok()?.into_bytes())
    }

    /// The object of a descriptor, as if a path had led to it.
    pub(crate) fn found(self, fd: i32) -> Result<Found, Errno> {
        named(self.descriptor(fd)?)
    }

    /// Resolves `path` relative to the thread's descriptor `at`.
    pub(crate) fn resolve(self, at: i32, path: &[u8], last: Last) -> Result<Found, Errno> {
        match path {
            [] => Err(Errno::NOENT),
            [b'/', ..] => self.walk(CWD, path, last, &mut 0),
            _ => self.walk(self.descriptor(at)?.as_fd(), path, last, &mut 0),
        }
    }

    fn walk(self, base: BorrowedFd<'_>, path: &[u8], last: Last, links: &mut u32) -> Result<Found, Errno> {
        let trimmed = trim_slashes(path);
        let trailing_slash = trimmed.len() < path.len();
        if trimmed.is_empty() {
            return named(self.world.root()?);
        }
        let (folder, name) = match trimmed.iter().rposition(|byte| *byte == b'/') {
            Some(slash) => (&trimmed[..=slash], &trimmed[slash + 1..]),
            None => (&b"."[..], trimmed),
        };
        let (parent, parent_path) = self.folder(base, folder, links)?;
        if name == b"." || name == b".." {
            return named(openat(&parent, name, PIN | OFlags::DIRECTORY, Mode::empty())?);
        }
        let path = join(&parent_path, name);
        let object = match openat(&parent, name, PIN | OFlags::NOFOLLOW, Mode::empty()) {
            Ok(object) => object,
            Err(Errno::NOENT) => {
                return Ok(Found {
                    path,
                    object: None,
                    parent: Some(parent),
                    trailing_slash,
                });
            }
            Err(errno) => return Err(errno),
        };
        let follow = last == Last::Follow || (last == Last::NoFollow && trailing_slash);
        if follow && kind(&object)? == FileType::Symlink {
            *links += 1;
            if *links > MAX_LINKS {
                return Err(Errno::LOOP);
            }
            return match self.link(&parent, name)? {
                Link::Object(object) => named(object),
                Link::Text(mut text) => {
                    if trailing_slash {
                        text.push(b'/');
                    }
                    self.walk(parent.as_fd(), &text, Last::Follow, links)
                }
            };
        }
        Ok(Found {
            path,
            object: Some(object),
            parent: Some(parent),
            trailing_slash,
        })
    }

    /// Opens the folder part of a path. The kernel walks it whole unless it leads through `/proc/self` or a magic link.
    fn folder(self, base: BorrowedFd<'_>, path: &[u8], links: &mut u32) -> Result<(OwnedFd, Vec<u8>), Errno> {
        match self.walk_by_kernel(base, path) {
            Ok(folder) => {
                let name = name_of(folder.as_fd())?;
                if self.world.is_apart() || !is_own_process(&name) {
                    return Ok((folder, name));
                }
            }
            Err(Errno::LOOP) => {}
            // `/proc/self` of another pid namespace does not exist for the supervisor.
            Err(Errno::NOENT) if self.world.is_apart() => {}
            Err(errno) => return Err(errno),
        }
        let mut current = if path.first() == Some(&b'/') {
            self.world.root()?
        } else {
            openat(base, ".", PIN | OFlags::DIRECTORY, Mode::empty())?
        };
        for name in path
            .split(|byte| *byte == b'/')
            .filter(|name| !name.is_empty() && *name != b".")
        {
            let next = openat(&current, name, PIN | OFlags::NOFOLLOW, Mode::empty())?;
            current = if kind(&next)? == FileType::Symlink {
                *links += 1;
                if *links > MAX_LINKS {
                    return Err(Errno::LOOP);
                }
                match self.link(&current, name)? {
                    Link::Object(object) => object,
                    Link::Text(text) => self
                        .walk(current.as_fd(), &text, Last::Follow, links)?
                        .object
                        .ok_or(Errno::NOENT)?,
                }
            } else {
                next
            };
            if kind(&current)? != FileType::Directory {
                return Err(Errno::NOTDIR);
            }
        }
        let name = name_of(current.as_fd())?;
        Ok((current, name))
    }

    fn walk_by_kernel(self, base: BorrowedFd<'_>, path: &[u8]) -> Result<OwnedFd, Errno> {
        let flags = PIN | OFlags::DIRECTORY;
        if path.first() == Some(&b'/') {
            return self.world.open(path, flags, ResolveFlags::NO_MAGICLINKS);
        }
        // An absolute link would lead to the supervisor's root.
        let links = if self.world.is_apart() {
            ResolveFlags::NO_SYMLINKS
        } else {
            ResolveFlags::NO_MAGICLINKS
        };
        openat2(base, path, flags, Mode::empty(), links)
    }

    /// Where a symbolic link leads, for this thread.
    fn link(self, parent: &OwnedFd, name: &[u8]) -> Result<Link, Errno> {
        if rustix::fs::fstatfs(parent)?.f_type == libc::PROC_SUPER_MAGIC {
            let is_root = rustix::fs::fstat(parent)?.st_ino == PROC_ROOT_INODE;
            let inner = |pid: Option<i32>| pid.and_then(crate::tree::inner_number).ok_or(Errno::NOENT);
            let group = || inner(crate::tree::thread_group(self.thread));
            match name {
                b"self" if is_root => return Ok(Link::Text(group()?.to_string().into_bytes())),
                b"thread-self" if is_root => {
                    let thread = inner(Some(self.thread))?;
                    return Ok(Link::Text(format!("{}/task/{thread}", group()?).into_bytes()));
                }
                _ if is_root => {}
                // Below a process every link is a magic one: its text is no path, only following it gives the object.
                _ => return Ok(Link::Object(openat(parent, name, PIN, Mode::empty())?)),
            }
        }
        Ok(Link::Text(
            rustix::fs::readlinkat(parent, name, Vec::new())?.into_bytes(),
        ))
    }
}

/// An object that was reached other than by a name in a folder.
pub(crate) fn named(object: OwnedFd) -> Result<Found, Errno> {
    let path = name_of(object.as_fd())?;
    Ok(Found {
        path,
        object: Some(object),
        parent: None,
        trailing_slash: false,
    })
}

/// The canonical name of a pinned object. What has no name any more keeps the one it had.
fn name_of(object: BorrowedFd<'_>) -> Result<Vec<u8>, Errno> {
    let mut name = rustix::fs::readlink(own_path(object), Vec::with_capacity(256))?.into_bytes();
    if name.ends_with(b" (deleted)") && rustix::fs::fstat(object)?.st_nlink == 0 {
        name.truncate(name.len() - b" (deleted)".len());
    }
    if name == b"/" && !is_mounted(object) {
        // The kernel calls it so when it was moved out of the mount through which it is held: as a name that would be a wrong one.
        name = b"/(unreachable)".to_vec();
    }
    Ok(name)
}

/// Whether an object is the root of a mount, as `/` is.
fn is_mounted(object: BorrowedFd<'_>) -> bool {
    statx(object, "", AtFlags::EMPTY_PATH, StatxFlags::empty())
        .is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// A path of the supervisor's that leads to a pinned object.
pub(crate) fn own_path(object: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", object.as_raw_fd())
}

/// Pipes, sockets, memory files and other objects without a place in the file system: they belong to whoever holds a descriptor.
pub(crate) fn is_nameless(found: &Found) -> bool {
    const MEMORY: [&[u8]; 4] = [b"/memfd:", b"/SYSV", b"/dev/zero", b"/anon_hugepage"];
    let has_no_link = || {
        found
            .object
            .as_ref()
            .and_then(|object| rustix::fs::fstat(object).ok())
            .is_some_and(|stat| stat.st_nlink == 0)
    };
    found.path.first() != Some(&b'/') || (MEMORY.iter().any(|name| found.path.starts_with(name)) && has_no_link())
}

/// The type of a pinned object.
pub(crate) fn kind(object: &OwnedFd) -> Result<FileType, Errno> {
    Ok(FileType::from_raw_mode(rustix::fs::fstat(object)?.st_mode))
}

/// The kernel walked through `/proc/self` and so into the supervisor's own folder.
fn is_own_process(path: &[u8]) -> bool {
    path.strip_prefix(b"/proc/").is_some_and(|rest| {
        let own = std::process::id().to_string();
        rest.strip_prefix(own.as_bytes())
            .is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
    })
}

fn trim_slashes(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1);
    &path[..end]
}

/// `folder/name`, without a second slash below the root.
pub(crate) fn join(folder: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = Vec::with_capacity(folder.len() + 1 + name.len());
    path.extend_from_slice(folder);
    if !folder.ends_with(b"/") {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    path
}

fn errno(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}
