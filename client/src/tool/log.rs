//! Append-only files of JSON lines: the events of a session, the decisions about escalations.
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::OFlags;
use serde::Serialize;
use serde_json::Value;

/// A log cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the log {}: {source}", path.display())]
pub struct LogError {
    /// Which.
    pub path: PathBuf,
    /// Why not.
    pub source: std::io::Error,
}

/// One file. Whoever else appends to it meanwhile does no harm: each event is one write.
#[derive(Debug)]
pub(super) struct EventLog {
    path: PathBuf,
    file: File,
}

impl EventLog {
    /// Opens the log for its user alone, and makes it when there is none.
    pub(super) fn open(path: &Path) -> Result<Self, LogError> {
        let failed = |source| LogError {
            path: path.to_owned(),
            source,
        };
        let path = std::path::absolute(path).map_err(failed)?;
        let is_new = !path.exists();
        let file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .mode(0o600)
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
            .open(&path)
            .map_err(failed)?;
        // A device or a FIFO might never end, and keeps nothing.
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(failed(std::io::Error::other("not a regular file")));
        }
        if let Some(folder) = path.parent().filter(|_| is_new) {
            // Without this a power cut could take the name away from what was written.
            File::open(folder)
                .and_then(|folder| folder.sync_all())
                .map_err(failed)?;
        }
        Ok(Self { path, file })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Every event in order. What is no JSON is the rest of a write that was cut short: nobody was told that it happened.
    pub(super) fn events(&self) -> Result<Vec<Value>, LogError> {
        let mut bytes = Vec::new();
        // A file of its own, so that reading begins at the start.
        File::open(&self.path)
            .and_then(|mut file| file.read_to_end(&mut bytes))
            .map_err(|source| self.failed(source))?;
        let lines = bytes.split(|byte| *byte == b'\n');
        Ok(lines.filter_map(|line| serde_json::from_slice(line).ok()).collect())
    }

    /// Appends an event and returns when it is on the disk.
    pub(super) fn append(&self, event: &impl Serialize) -> Result<(), LogError> {
        let line = serde_json::to_vec(event).map_err(|error| self.failed(error.into()))?;
        // What a write before may have left unfinished gets its end first, so that it spoils no more than itself.
        let mut bytes = Vec::with_capacity(line.len() + 2);
        if !self.ends_clean().map_err(|source| self.failed(source))? {
            bytes.push(b'\n');
        }
        bytes.extend_from_slice(&line);
        bytes.push(b'\n');
        (&self.file)
            .write_all(&bytes)
            .and_then(|()| self.file.sync_data())
            .map_err(|source| self.failed(source))
    }

    fn ends_clean(&self) -> std::io::Result<bool> {
        use std::os::unix::fs::FileExt;
        let length = self.file.metadata()?.len();
        let mut last = [0];
        Ok(length == 0 || (self.file.read_at(&mut last, length - 1)? == 1 && last == *b"\n"))
    }

    /// One that every write to fails.
    #[cfg(test)]
    pub(super) fn read_only(path: &Path) -> std::io::Result<Self> {
        let (path, file) = (path.to_owned(), File::open(path)?);
        Ok(Self { path, file })
    }

    fn failed(&self, source: std::io::Error) -> LogError {
        LogError {
            path: self.path.clone(),
            source,
        }
    }
}

/// Milliseconds since 1970.
pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn events_come_back_in_order_and_a_torn_one_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let log = EventLog::open(&path).unwrap();
        log.append(&json!({"n": 1})).unwrap();
        fs::write(&path, [fs::read(&path).unwrap(), br#"{"n": 2, "x"#.to_vec()].concat()).unwrap();
        assert_eq!(log.events().unwrap(), [json!({"n": 1})]);
        let again = EventLog::open(&path).unwrap();
        again.append(&json!({"n": 3})).unwrap();
        assert_eq!(again.events().unwrap(), [json!({"n": 1}), json!({"n": 3})]);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_log_that_cannot_be_used_is_named() {
        let error = EventLog::open(Path::new("/nonexistent/log.jsonl")).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot use the log /nonexistent/log.jsonl: No such file or directory (os error 2)"
        );
        let endless = EventLog::open(Path::new("/dev/full")).unwrap_err();
        assert_eq!(endless.to_string(), "cannot use the log /dev/full: not a regular file");
    }
}
