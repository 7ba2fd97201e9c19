//! Private temporary folders: their names, the record that lets the next daemon remove what a killed one left, and a removal that nothing can lead astray.
//!
//! The helper makes and removes the folder; the daemon removes it only when the helper could not. Each daemon appends the names to a file of its own
//! which it keeps locked; a file that nobody locks is that of a dead daemon.
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::fs::{AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, flock};
use rustix::process::geteuid;

use crate::helper::lock;
use crate::paths::random_name;

const PREFIX: &str = "tmpdirs-";
/// The record is emptied when it is longer than this and nothing runs.
const RECORD_LIMIT: u64 = 64 * 1024;
/// Folders deeper than this are moved up before they are emptied, so that neither the stack nor descriptors run out.
const DEPTH: usize = 40;

/// The record of one daemon.
#[derive(Debug)]
pub(crate) struct Record {
    file: Mutex<Lines>,
    path: PathBuf,
}

#[derive(Debug)]
struct Lines {
    file: File,
    length: u64,
    open: usize,
}

impl Record {
    /// Cleans up after dead daemons and begins a new record in `state`.
    pub(crate) fn begin(state: &Path) -> io::Result<Self> {
        remove_stale(state)?;
        let path = state.join(format!("{PREFIX}{}", random_name()?));
        let file = OpenOptions::new()
            .append(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        Ok(Self {
            file: Mutex::new(Lines {
                file,
                length: 0,
                open: 0,
            }),
            path,
        })
    }

    /// A fresh, recorded name. The folder is not made.
    pub(crate) fn choose(&self) -> io::Result<PathBuf> {
        let name = format!("/tmp/dsh-{}-{}", geteuid().as_raw(), random_name()?);
        let mut lines = lock(&self.file);
        if lines.open == 0 && lines.length > RECORD_LIMIT {
            lines.file.set_len(0)?;
            lines.length = 0;
        }
        lines.file.write_all(format!("{name}\n").as_bytes())?;
        lines.length += name.len() as u64 + 1;
        lines.open += 1;
        Ok(PathBuf::from(name))
    }

    /// The command is over: its folder is removed if the helper has not.
    pub(crate) fn release(&self, folder: &Path) {
        lock(&self.file).open -= 1;
        remove(folder);
    }

    /// The daemon leaves and nothing runs.
    pub(crate) fn end(&self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::debug!(%error, "the record of temporary folders could not be removed");
        }
    }
}

/// Removes what dead processes have left.
pub(crate) fn remove_stale(state: &Path) -> io::Result<()> {
    for entry in fs::read_dir(state)?.flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        let Ok(file) = File::open(entry.path()) else { continue };
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            continue;
        }
        let own = format!("/tmp/dsh-{}-", geteuid().as_raw());
        for line in fs::read_to_string(entry.path())?.lines() {
            if line
                .strip_prefix(&own)
                .is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_hexdigit()))
            {
                remove(Path::new(line));
            }
        }
        fs::remove_file(entry.path())?;
    }
    Ok(())
}

/// Removes a folder of this user with everything in it, whatever the modes inside, without ever following a link out of it.
pub(crate) fn remove(folder: &Path) {
    match fs::symlink_metadata(folder) {
        Ok(metadata) if metadata.is_dir() && metadata.uid() == geteuid().as_raw() => {}
        _ => return,
    }
    let removed = open_folder(CWD, folder).and_then(|root| {
        empty(&root, &root, 0)?;
        Ok(rustix::fs::unlinkat(CWD, folder, AtFlags::REMOVEDIR)?)
    });
    if let Err(error) = removed {
        tracing::warn!(%error, folder = %folder.display(), "a temporary folder could not be removed");
    }
}

/// Removes everything in `folder`; what lies too deep is moved directly below `top` and emptied there.
fn empty(folder: &OwnedFd, top: &OwnedFd, depth: usize) -> io::Result<()> {
    // A round that moved folders up has given `top` new entries: look again until it is empty.
    while !entries(folder)?.is_empty() {
        for (name, kind) in entries(folder)? {
            if kind != FileType::Directory {
                rustix::fs::unlinkat(folder, &*name, AtFlags::empty())?;
                continue;
            }
            if depth >= DEPTH {
                open_folder(folder, &*name)?;
                rustix::fs::renameat(folder, &*name, top, random_name()?)?;
                continue;
            }
            empty(&open_folder(folder, &*name)?, top, depth + 1)?;
            rustix::fs::unlinkat(folder, &*name, AtFlags::REMOVEDIR)?;
        }
        if depth > 0 {
            break;
        }
    }
    Ok(())
}

fn entries(folder: &OwnedFd) -> io::Result<Vec<(std::ffi::CString, FileType)>> {
    let mut found = Vec::new();
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let kind = match entry.file_type() {
            FileType::Unknown => {
                FileType::from_raw_mode(rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode)
            }
            known => known,
        };
        found.push((name.to_owned(), kind));
    }
    Ok(found)
}

/// Opens a folder itself, never what a link points to, after making it accessible to its owner.
fn open_folder<P: rustix::path::Arg>(parent: impl AsFd, name: P) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let pinned = rustix::fs::openat(parent, name, flags | OFlags::PATH, Mode::empty())?;
    let through_proc = format!("/proc/self/fd/{}", pinned.as_raw_fd());
    // The path goes to the pinned folder, not through its name.
    rustix::fs::chmod(&*through_proc, Mode::RWXU)?;
    Ok(rustix::fs::openat(
        &pinned,
        c".",
        OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    #[test]
    fn odd_modes_and_deep_trees_go_and_links_are_not_followed() {
        let base = tempfile::tempdir().unwrap();
        let outside = base.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("kept"), "x").unwrap();
        fs::set_permissions(&outside, fs::Permissions::from_mode(0o750)).unwrap();
        let folder = base.path().join("tmp");
        let mut deep = folder.clone();
        for _ in 0..150 {
            deep.push("d");
        }
        fs::create_dir_all(&deep).unwrap();
        fs::write(deep.join("f"), "x").unwrap();
        symlink(&outside, folder.join("link")).unwrap();
        let closed = folder.join("closed");
        fs::create_dir(&closed).unwrap();
        fs::write(closed.join("f"), "x").unwrap();
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
        remove(&folder);
        assert!(!folder.exists());
        assert_eq!(fs::read(outside.join("kept")).unwrap(), b"x");
        assert_eq!(fs::metadata(&outside).unwrap().permissions().mode() & 0o777, 0o750);
    }

    #[test]
    fn the_next_daemon_removes_what_a_dead_one_recorded_and_not_what_a_living_one_did() {
        let state = tempfile::tempdir().unwrap();
        let living = Record::begin(state.path()).unwrap();
        let used = living.choose().unwrap();
        fs::create_dir(&used).unwrap();
        let dead = {
            let record = Record::begin(state.path()).unwrap();
            record.choose().unwrap()
        };
        fs::create_dir(&dead).unwrap();
        let next = Record::begin(state.path()).unwrap();
        assert!(!dead.exists() && used.exists());
        living.release(&used);
        assert!(!used.exists());
        living.end();
        next.end();
        assert_eq!(fs::read_dir(state.path()).unwrap().count(), 0);
    }
}
