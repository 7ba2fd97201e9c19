//! One detached task on disk: what it is, who keeps it, how far it was read, what it wrote and what became of it.
//!
//! | file | written by | says |
//! |---|---|---|
//! | `about` | the daemon, before anything runs | number, label, owner, mode |
//! | `reader` | the daemon that knows the task, which keeps it locked | how far the consuming reader is, and whether the end was told |
//! | `keeper` | the keeper, which keeps it locked | its process id |
//! | `socket` | the keeper | where it answers |
//! | `outcome` | the keeper, before anybody hears of the end; for a keeper that died the daemon | result or failure |
//! | `*.stdout`, `*.stderr` | the keeper | the streams, `.part` while they grow |
//! | `log` | the keeper | its log |
//!
//! All calls block for as long as a local disk does.
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use dsh_policy::mode::SandboxMode;
use dsh_policy::task::Cursor;
use dsh_policy::wire::StreamName;
use dsh_policy::{BashRunResult, ExecError};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::task::Outcome;
use crate::tmpdir;

/// What a task is, beyond what runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct About {
    pub(crate) number: u64,
    pub(crate) label: String,
    pub(crate) session: Option<String>,
    pub(crate) mode: SandboxMode,
}

/// An outcome as a file has it.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Written {
    Result(Box<BashRunResult>),
    Failure(ExecError),
}

/// How a task's keeper is.
#[derive(Debug)]
pub(crate) enum Keeper {
    /// It lives.
    Alive {
        /// Its process id; none when it has not written that yet.
        pid: Option<i32>,
    },
    /// It has ended; whoever holds this holds its lock.
    Gone(#[allow(dead_code, reason = "held for its lock")] File),
    /// There has never been one.
    Never,
}

/// The consuming reader's place, kept where a killed daemon cannot take it along.
#[derive(Debug)]
pub(crate) struct ReaderFile(File);

/// Length of what `reader` holds: two positions and a flag.
const READER: usize = 17;

impl ReaderFile {
    /// Keeps the place. One write of a few bytes: a kill does not cut it in two.
    pub(crate) fn save(&self, cursor: Cursor, told: bool) -> io::Result<()> {
        let mut bytes = [0; READER];
        bytes[..8].copy_from_slice(&cursor.stdout.to_le_bytes());
        bytes[8..16].copy_from_slice(&cursor.stderr.to_le_bytes());
        bytes[16] = u8::from(told);
        self.0.write_all_at(&bytes, 0)
    }

    /// The place that was kept; the beginning when there is none.
    pub(crate) fn load(&self) -> (Cursor, bool) {
        let mut bytes = [0; READER];
        if self.0.read_exact_at(&mut bytes, 0).is_err() {
            return (Cursor::default(), false);
        }
        let number = |at: usize| {
            bytes[at..at + 8]
                .iter()
                .rev()
                .fold(0, |all, byte| all << 8 | u64::from(*byte))
        };
        let cursor = Cursor {
            stdout: number(0),
            stderr: number(8),
        };
        (cursor, bytes[16] != 0)
    }
}

/// The folder of one task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TaskFolder {
    path: PathBuf,
}

fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    let nofollow = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
    options.mode(0o600).custom_flags(nofollow);
    options
}

/// Whether the lock of `file` could be taken; other failures count as no.
fn locked(file: &File) -> bool {
    flock(file, FlockOperation::NonBlockingLockExclusive).is_ok()
}

impl TaskFolder {
    /// An existing folder.
    pub(crate) fn at(path: PathBuf) -> Self {
        Self { path }
    }

    /// A new folder for a task below `all`, under the first free number from `number` on.
    pub(crate) fn create(all: &Path, mut number: u64) -> io::Result<(Self, u64)> {
        DirBuilder::new().recursive(true).mode(0o700).create(all)?;
        loop {
            let path = all.join(number.to_string());
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok((Self { path }, number)),
                // Another daemon of the same state folder has a task of this number.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(error),
            }
        }
    }

    /// Every task below `all`, by number.
    pub(crate) fn all(all: &Path) -> io::Result<Vec<(u64, Self)>> {
        let entries = match fs::read_dir(all) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut found: Vec<(u64, Self)> = entries
            .flatten()
            .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, Self::at(entry.path()))))
            .collect();
        found.sort_by_key(|(number, _)| *number);
        Ok(found)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Takes the reader's place of this task; none when another daemon has it.
    pub(crate) fn take_reader(&self) -> io::Result<Option<ReaderFile>> {
        let file = private()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(self.path.join("reader"))?;
        Ok(locked(&file).then_some(ReaderFile(file)))
    }

    /// Writes a file that is there whole or not at all, also after a loss of power.
    fn write_whole(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let unfinished = self.path.join(format!("{name}.new"));
        let mut file = private().write(true).create(true).truncate(true).open(&unfinished)?;
        file.write_all(bytes)?;
        file.sync_data()?;
        fs::rename(unfinished, self.path.join(name))?;
        File::open(&self.path)?.sync_all()
    }

    pub(crate) fn write_about(&self, about: &About) -> io::Result<()> {
        self.write_whole("about", &serde_json::to_vec(about)?)
    }

    pub(crate) fn about(&self) -> io::Result<About> {
        Ok(serde_json::from_slice(&fs::read(self.path.join("about"))?)?)
    }

    pub(crate) fn write_outcome(&self, outcome: &Outcome) -> io::Result<()> {
        let written = match outcome {
            Ok(result) => Written::Result(Box::new(result.clone())),
            Err(error) => Written::Failure(error.clone()),
        };
        self.write_whole("outcome", &serde_json::to_vec(&written)?)
    }

    /// What became of the task, and when; none while that is not known.
    pub(crate) fn outcome(&self) -> io::Result<Option<(Outcome, SystemTime)>> {
        let mut file = match File::open(self.path.join("outcome")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let at = file.metadata()?.modified()?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let outcome = match serde_json::from_slice(&bytes)? {
            Written::Result(result) => Ok(*result),
            Written::Failure(error) => Err(error),
        };
        Ok(Some((outcome, at)))
    }

    /// Makes this process the task's keeper. The lock lasts as long as what is given.
    ///
    /// # Errors
    /// When the folder is gone, or somebody else keeps or has buried the task: then nothing may run.
    pub(crate) fn become_keeper(&self) -> io::Result<File> {
        let file = private()
            .write(true)
            .create(true)
            .truncate(false)
            .open(self.path.join("keeper"))?;
        if !locked(&file) || self.path.join("outcome").exists() {
            return Err(io::Error::other("the task has a keeper or has ended"));
        }
        file.write_all_at(std::process::id().to_string().as_bytes(), 0)?;
        Ok(file)
    }

    pub(crate) fn keeper(&self) -> io::Result<Keeper> {
        let mut file = match File::open(self.path.join("keeper")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Keeper::Never),
            file => file?,
        };
        if locked(&file) {
            return Ok(Keeper::Gone(file));
        }
        let mut pid = String::new();
        file.read_to_string(&mut pid)?;
        Ok(Keeper::Alive { pid: pid.parse().ok() })
    }

    /// Calls `with` with a path of the keeper's socket that is short enough for one, however deep the folder lies.
    pub(crate) fn with_socket<T>(&self, with: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<T> {
        let folder = File::open(&self.path)?;
        with(&PathBuf::from(format!("/proc/self/fd/{}/socket", folder.as_raw_fd())))
    }

    /// The keeper's log.
    pub(crate) fn log(&self) -> io::Result<File> {
        private().append(true).create(true).open(self.path.join("log"))
    }

    /// The files of one stream, whole or growing.
    fn streams(&self) -> Vec<(StreamName, PathBuf)> {
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        let named = entries.filter_map(|entry| {
            let path = entry.path();
            let name = path.file_name()?.to_str()?.trim_end_matches(".part").to_owned();
            let stream = StreamName::ALL
                .iter()
                .find(|stream| name.ends_with(&format!(".{stream}")))?;
            Some((*stream, path))
        });
        named.collect()
    }

    /// Where the streams are, as far as they have been written.
    pub(crate) fn stream_files(&self) -> Vec<PathBuf> {
        self.streams().into_iter().map(|(_, path)| path).collect()
    }

    /// The files of the streams by name, when nobody writes them any more: they lose the mark of what is growing.
    pub(crate) fn salvage(&self) -> io::Result<Vec<(StreamName, PathBuf)>> {
        let mut streams = self.streams();
        for (_, path) in &mut streams {
            if path.extension().is_some_and(|extension| extension == "part") {
                let whole = path.with_extension("");
                fs::rename(&*path, &whole)?;
                *path = whole;
            }
        }
        Ok(streams)
    }

    /// Removes growing files of streams that the result has whole.
    pub(crate) fn remove_parts(&self) {
        for (_, path) in self.streams() {
            if path.extension().is_some_and(|extension| extension == "part") {
                crate::spill::remove(&path);
            }
        }
    }

    /// Removes everything.
    pub(crate) fn remove(&self) {
        tmpdir::remove(&self.path);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use dsh_policy::ErrorCode;

    #[test]
    fn a_place_is_found_again_and_belongs_to_one_daemon() {
        let base = tempfile::tempdir().unwrap();
        let (folder, number) = TaskFolder::create(base.path(), 7).unwrap();
        assert_eq!(number, 7);
        assert_eq!(TaskFolder::create(base.path(), 7).unwrap().1, 8);
        let reader = folder.take_reader().unwrap().unwrap();
        assert_eq!(reader.load(), (Cursor::default(), false));
        let cursor = Cursor {
            stdout: u64::MAX - 1,
            stderr: 513,
        };
        reader.save(cursor, true).unwrap();
        assert!(folder.take_reader().unwrap().is_none());
        drop(reader);
        assert_eq!(folder.take_reader().unwrap().unwrap().load(), (cursor, true));
    }

    #[test]
    fn a_task_has_one_keeper_and_none_once_it_has_ended() {
        let base = tempfile::tempdir().unwrap();
        let (folder, _) = TaskFolder::create(base.path(), 1).unwrap();
        assert!(matches!(folder.keeper().unwrap(), Keeper::Never));
        let keeper = folder.become_keeper().unwrap();
        assert!(folder.become_keeper().is_err());
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(matches!(folder.keeper().unwrap(), Keeper::Alive { pid: Some(pid) } if pid == own));
        drop(keeper);
        assert!(matches!(folder.keeper().unwrap(), Keeper::Gone(_)));
        assert!(folder.outcome().unwrap().is_none());
        let failure = Err(ExecError::new(ErrorCode::Unknown, "lost"));
        folder.write_outcome(&failure).unwrap();
        assert_eq!(folder.outcome().unwrap().unwrap().0, failure);
        assert!(folder.become_keeper().is_err(), "what has ended cannot begin");
        folder.remove();
        assert_eq!(TaskFolder::all(base.path()).unwrap(), []);
    }

    #[test]
    fn growing_files_are_salvaged() {
        let base = tempfile::tempdir().unwrap();
        let (folder, _) = TaskFolder::create(base.path(), 1).unwrap();
        fs::write(folder.path().join("a.stdout.part"), "x").unwrap();
        fs::write(folder.path().join("about"), "x").unwrap();
        let salvaged = folder.salvage().unwrap();
        assert_eq!(salvaged, [(StreamName::Stdout, folder.path().join("a.stdout"))]);
        assert_eq!(folder.stream_files(), [folder.path().join("a.stdout")]);
    }
}
