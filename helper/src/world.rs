//! The command's file system and processes as the supervisor sees them: its own, or the inside of the command's namespaces, looked at from outside.
//!
//! The supervisor never enters the namespaces. It holds the root folder that it pinned when they were made and resolves the command's paths below that;
//! it sees the command's processes by the numbers that they have outside.
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Statx, StatxFlags, openat, openat2, statx};
use rustix::io::Errno;

use crate::sys::Inside;

/// Where a command runs.
#[derive(Debug)]
pub(crate) struct World {
    /// None when the command shares the supervisor's.
    inside: Option<Inside>,
}

impl World {
    /// The supervisor's own.
    pub(crate) const HOST: Self = Self { inside: None };

    /// That of a command with namespaces of its own, when it has them.
    pub(crate) fn new(inside: Option<Inside>) -> Self {
        Self { inside }
    }

    /// Whether the command has mounts, process numbers and System V objects of its own.
    pub(crate) fn is_apart(&self) -> bool {
        self.inside.is_some()
    }

    /// Opens an absolute path as the command would; links are followed inside.
    pub(crate) fn open(&self, path: &[u8], flags: OFlags, resolve: ResolveFlags) -> Result<OwnedFd, Errno> {
        match &self.inside {
            // The older call is there inside another sandbox too.
            None if resolve.is_empty() => openat(CWD, path, flags, Mode::empty()),
            None => openat2(CWD, path, flags, Mode::empty(), resolve),
            Some(inside) => {
                let scoped = resolve | ResolveFlags::IN_ROOT;
                openat2(&inside.root, path, flags, Mode::empty(), scoped).map_err(|errno| match errno {
                    Errno::XDEV => Errno::LOOP, // A magic link, which may not be followed from a scoped walk.
                    other => other,
                })
            }
        }
    }

    /// The root folder.
    pub(crate) fn root(&self) -> Result<OwnedFd, Errno> {
        match &self.inside {
            None => openat(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()),
            Some(inside) => rustix::io::fcntl_dupfd_cloexec(&inside.root, 3),
        }
    }

    /// What is known of a canonical name, itself and not what it may lead to.
    pub(crate) fn stat(&self, name: &[u8], wanted: StatxFlags) -> Result<Statx, Errno> {
        statx(self.base(), self.below_base(name), AtFlags::SYMLINK_NOFOLLOW, wanted)
    }

    /// Whether a canonical name exists.
    pub(crate) fn has(&self, name: &[u8]) -> bool {
        self.stat(name, StatxFlags::TYPE).is_ok()
    }

    /// Whether a process or process group of this number is the command's own, or never was one of anybody's here: then the kernel answers by itself.
    pub(crate) fn owns_number(&self, number: i32) -> bool {
        let Some(inside) = &self.inside else {
            return crate::tree::is_ours(number);
        };
        // A number up to the newest one inside is that of a process of the command that has ended.
        self.has(format!("/proc/{number}").as_bytes()) || inside.last_number().is_none_or(|last| number <= last)
    }

    /// Whether `/proc/NUMBER` names a process of the command.
    pub(crate) fn is_own_process(&self, number: i32) -> bool {
        match &self.inside {
            None => crate::tree::is_ours(number),
            // The first process belongs to the sandbox.
            Some(_) => number > 1 && self.has(format!("/proc/{number}").as_bytes()),
        }
    }

    /// The shell has ended: what keeps the namespaces open lets go.
    pub(crate) fn let_go(&self) {
        if let Some(inside) = &self.inside {
            inside.let_go();
        }
    }

    fn base(&self) -> BorrowedFd<'_> {
        self.inside.as_ref().map_or(CWD, |inside| inside.root.as_fd())
    }

    /// An absolute name in the form that [`World::base`] takes.
    fn below_base<'a>(&self, name: &'a [u8]) -> &'a [u8] {
        match (&self.inside, name.strip_prefix(b"/")) {
            (Some(_), Some(b"")) => b".",
            (Some(_), Some(rest)) => rest,
            _ => name,
        }
    }
}

/// The supervisor's own object of a name, when it is the same one as `object`: without the mounts that were made for the command.
pub(crate) fn outside(object: BorrowedFd<'_>) -> Option<OwnedFd> {
    let name = rustix::fs::readlink(crate::object::own_path(object), Vec::new()).ok()?;
    let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let found = openat2(CWD, name.as_c_str(), flags, Mode::empty(), ResolveFlags::NO_SYMLINKS).ok()?;
    let (here, there) = (rustix::fs::fstat(&found).ok()?, rustix::fs::fstat(object).ok()?);
    let same = (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
        && FileType::from_raw_mode(here.st_mode) == FileType::from_raw_mode(there.st_mode);
    same.then_some(found)
}
