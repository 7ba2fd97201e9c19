//! The private temporary folder of one command: made before it starts, removed with all its contents after it has ended.
//!
//! Its contents were made by the command and are hostile: removal never follows a symbolic link, never leaves the folder (every step is relative to an
//! open descriptor of a real folder on the same file system), and undoes modes that lock it out. Nothing runs any more when it happens.
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, fchmod, mkdirat, openat, unlinkat};
use rustix::io::Errno;

/// Folders that are open at once on the way down; deeper ones are moved up first.
const MAX_DEPTH: usize = 64;

/// Makes the folder, which must not exist yet.
pub(crate) fn make(path: &CStr) -> Result<(), Errno> {
    mkdirat(CWD, path, Mode::RWXU)?;
    // The mask of the helper may have taken bits away. Only then: a supervisor of an outer sandbox cannot see the descriptors of this process.
    let folder = open_folder(CWD, path)?;
    if Mode::from_raw_mode(rustix::fs::fstat(&folder)?.st_mode) == Mode::RWXU {
        return Ok(());
    }
    fchmod(&folder, Mode::RWXU)
}

/// Removes the folder and everything in it.
pub(crate) fn remove(path: &CStr) -> Result<(), Errno> {
    if let Ok(root) = unlocked(CWD, path) {
        while !empty(&root, &root, 0)? {}
    }
    match unlinkat(CWD, path, AtFlags::REMOVEDIR) {
        Err(Errno::NOENT) => Ok(()),
        other => other,
    }
}

/// Empties a folder. False when something too deep was moved up to `root`, so that another round is needed.
fn empty(root: &OwnedFd, folder: &OwnedFd, depth: usize) -> Result<bool, Errno> {
    let mut complete = true;
    let names: Vec<(CString, FileType)> = Dir::read_from(folder)?
        .flatten()
        .map(|entry| (entry.file_name().to_owned(), entry.file_type()))
        .filter(|(name, _)| name.as_c_str() != c"." && name.as_c_str() != c"..")
        .collect();
    for (name, kind) in names {
        if !matches!(kind, FileType::Directory | FileType::Unknown) || !is_folder(folder, &name) {
            unlinkat(folder, &name, AtFlags::empty())?;
            continue;
        }
        let child = unlocked(folder.as_fd(), &name)?;
        if depth < MAX_DEPTH {
            complete &= empty(root, &child, depth + 1)?;
            unlinkat(folder, &name, AtFlags::REMOVEDIR)?;
        } else {
            lift(root, &child)?;
            unlinkat(folder, &name, AtFlags::REMOVEDIR)?;
            complete = false;
        }
    }
    Ok(complete)
}

/// Moves the contents of a folder that lies too deep up to `root`, under names that are free there.
fn lift(root: &OwnedFd, folder: &OwnedFd) -> Result<(), Errno> {
    let mut number = 0u64;
    for entry in Dir::read_from(folder)?.flatten() {
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        loop {
            number += 1;
            let free = format!(".lifted-{number}");
            let moved =
                rustix::fs::renameat_with(folder, name, root, free.as_str(), rustix::fs::RenameFlags::NOREPLACE);
            match moved {
                Err(Errno::EXIST) => {}
                other => break other?,
            }
        }
    }
    Ok(())
}

fn is_folder(parent: &OwnedFd, name: &CStr) -> bool {
    rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}

/// Opens a folder for reading, giving its owner full access first when its mode locks even him out.
fn unlocked<Fd: AsFd>(parent: Fd, name: &CStr) -> Result<OwnedFd, Errno> {
    let pinned = openat(
        &parent,
        name,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let mode = rustix::fs::fstat(&pinned)?.st_mode;
    if mode & 0o700 != 0o700 {
        use std::os::fd::AsRawFd as _;
        rustix::fs::chmod(format!("/proc/self/fd/{}", pinned.as_raw_fd()), Mode::RWXU)?;
    }
    open_folder(parent, name)
}

fn open_folder<Fd: AsFd>(parent: Fd, name: &CStr) -> Result<OwnedFd, Errno> {
    openat(
        parent,
        name,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )
}
