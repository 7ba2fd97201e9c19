//! Spill files: the whole of a stream that is longer than its kept part, in a private folder, until it is too old or too much.
//!
//! A file is called `<random>.<stream>.part` and locked while it is written; it gets its final name when it is handed out. So a file that a
//! killed daemon left behind is told apart: it is a part that nobody locks.
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use dsh_policy::wire::StreamName;
use rustix::fs::{FlockOperation, flock};

use crate::paths::random_name;

const PART: &str = "part";

/// One stream's file. All calls block: they belong on a blocking thread.
#[derive(Debug)]
pub(crate) struct Spill {
    file: File,
    path: PathBuf,
    written: u64,
    cap: u64,
}

impl Spill {
    /// A new, empty, private, locked file in `folder`.
    pub(crate) fn create(folder: &Path, stream: StreamName, cap: u64) -> io::Result<Self> {
        let path = folder.join(format!("{}.{stream}.{PART}", random_name()?));
        let nofollow = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(nofollow)
            .open(&path)?;
        let spill = Self {
            file,
            path,
            written: 0,
            cap,
        };
        flock(&spill.file, FlockOperation::NonBlockingLockExclusive)?;
        Ok(spill)
    }

    /// Appends, and says whether the file is still complete: not when the cap is passed (then nothing is written any more).
    pub(crate) fn append(&mut self, bytes: &[u8]) -> io::Result<bool> {
        if self.written.saturating_add(bytes.len() as u64) > self.cap {
            return Ok(false);
        }
        self.file.write_all(bytes)?;
        self.written += bytes.len() as u64;
        Ok(true)
    }

    /// Where it grows.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the complete file its final name.
    pub(crate) fn finish(self) -> io::Result<PathBuf> {
        let path = self.path.with_extension("");
        fs::rename(&self.path, &path)?;
        Ok(path)
    }

    /// Removes the file.
    pub(crate) fn discard(self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(%error, "a spill file could not be removed");
        }
    }
}

/// How long and how much is kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Retention {
    /// Older files are removed.
    pub(crate) max_age: Duration,
    /// The oldest are removed until the rest is no larger.
    pub(crate) max_total: u64,
}

/// Removes abandoned parts, then what is too old, then the oldest until the rest is small enough.
pub(crate) fn clean(folder: &Path, retention: Retention, now: SystemTime) -> io::Result<()> {
    let mut kept = Vec::new();
    for entry in fs::read_dir(folder)?.flatten() {
        let path = entry.path();
        let Ok(metadata) = entry.metadata() else { continue };
        if path.extension().is_some_and(|extension| extension == PART) {
            remove_abandoned(&path);
            continue;
        }
        let modified = metadata.modified().unwrap_or(now);
        if now.duration_since(modified).is_ok_and(|age| age > retention.max_age) {
            remove(&path);
        } else {
            kept.push((modified, metadata.len(), path));
        }
    }
    kept.sort();
    let mut total: u64 = kept.iter().map(|(_, length, _)| length).sum();
    for (_, length, path) in kept {
        if total <= retention.max_total {
            break;
        }
        remove(&path);
        total -= length;
    }
    Ok(())
}

fn remove_abandoned(path: &Path) {
    let Ok(file) = File::open(path) else { return };
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
        remove(path);
    }
}

/// Removes a file that may be gone already.
pub(crate) fn remove(path: &Path) {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(%error, "a spill file could not be removed");
        }
        _ => {}
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_finished_file_is_private_and_has_every_byte() {
        let folder = tempfile::tempdir().unwrap();
        let mut spill = Spill::create(folder.path(), StreamName::Stdout, 10).unwrap();
        assert!(spill.append(b"12345").unwrap() && spill.append(b"67890").unwrap());
        let path = spill.finish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"1234567890");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        assert_eq!(path.extension().unwrap(), "stdout");
    }

    #[test]
    fn over_the_cap_nothing_is_offered_and_nothing_stays() {
        let folder = tempfile::tempdir().unwrap();
        let mut spill = Spill::create(folder.path(), StreamName::Stderr, 4).unwrap();
        assert!(spill.append(b"1234").unwrap());
        assert!(!spill.append(b"5").unwrap());
        spill.discard();
        assert_eq!(names(folder.path()), Vec::<String>::new());
    }

    #[test]
    fn cleaning_takes_abandoned_parts_and_old_files_but_not_what_is_being_written() {
        let folder = tempfile::tempdir().unwrap();
        let writing = Spill::create(folder.path(), StreamName::Stdout, 4).unwrap();
        fs::write(folder.path().join("dead.stdout.part"), "x").unwrap();
        fs::write(folder.path().join("a.stdout"), "12345").unwrap();
        let retention = Retention {
            max_age: Duration::from_secs(60),
            max_total: 100,
        };
        clean(folder.path(), retention, SystemTime::now()).unwrap();
        let writing_name = writing.path.file_name().unwrap().to_str().unwrap().to_owned();
        let mut expected = vec!["a.stdout".to_owned(), writing_name.clone()];
        expected.sort();
        assert_eq!(names(folder.path()), expected);
        clean(folder.path(), retention, SystemTime::now() + Duration::from_secs(120)).unwrap();
        assert_eq!(names(folder.path()), vec![writing_name]);
    }

    #[test]
    fn the_oldest_files_go_until_the_rest_is_small_enough() {
        let folder = tempfile::tempdir().unwrap();
        let now = SystemTime::now();
        for (index, name) in ["a", "b", "c"].iter().enumerate() {
            let file = File::create(folder.path().join(name)).unwrap();
            file.set_len(10).unwrap();
            file.set_modified(now - Duration::from_secs(30 - index as u64)).unwrap();
        }
        clean(
            folder.path(),
            Retention {
                max_age: Duration::from_secs(60),
                max_total: 20,
            },
            now,
        )
        .unwrap();
        assert_eq!(names(folder.path()), ["b", "c"]);
    }
}
