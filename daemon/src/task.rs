//! One background task: what it is, what it has written, how far it was read, what became of it.
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use dsh_policy::mode::{Lifetime, SandboxMode};
use dsh_policy::task::{Cursor, TaskInfo, TaskOutput, TaskStatus, WaitFor};
use dsh_policy::{BashExecRequest, BashRunResult, ByteString, ErrorCode, ExecError};
use tokio::sync::watch;
use tokio::task::spawn_blocking;

use crate::control::Handle;
use crate::feed::Feed;
use crate::helper::lock;
use crate::run;
use crate::state::shutting_down;
use crate::task_folder::{ReaderFile, TaskFolder};

pub(crate) const KIND: &str = "bash";
/// Characters of a command that serve as its label.
const LABEL: usize = 80;

/// What became of a task.
pub(crate) type Outcome = Result<BashRunResult, ExecError>;

/// A task that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) outcome: Outcome,
    pub(crate) at: SystemTime,
    /// What is left of the output of a command without a result.
    pub(crate) salvaged: Vec<PathBuf>,
}

/// One task.
pub(crate) struct Task {
    pub(crate) number: u64,
    pub(crate) label: String,
    pub(crate) session: Option<String>,
    pub(crate) mode: SandboxMode,
    pub(crate) feed: Arc<Feed>,
    pub(crate) handle: Handle,
    /// Set once, at the end.
    pub(crate) ended: watch::Sender<Option<Arc<Ended>>>,
    pub(crate) reading: Mutex<Reading>,
    /// Where a detached task is on disk; none for one that ends with the daemon.
    pub(crate) folder: Option<TaskFolder>,
}

/// How far a task was read and told of.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    /// Where the consuming reader is.
    pub(crate) cursor: Cursor,
    /// Whoever owns it knows that it has ended.
    told: bool,
    /// Keeps both beyond the life of this daemon.
    file: Option<ReaderFile>,
    /// Another daemon may know the task by now: this one says nothing more of it.
    released: bool,
}

impl Reading {
    /// Goes on where another daemon was.
    pub(crate) fn found(file: ReaderFile) -> Self {
        let (cursor, told) = file.load();
        Self {
            cursor,
            told,
            file: Some(file),
            released: false,
        }
    }

    pub(crate) fn is_told(&self) -> bool {
        self.told || self.released
    }

    /// Kept before anybody is answered: after a kill nothing is given twice, and what was not given can be read by cursor.
    pub(crate) fn set(&mut self, cursor: Cursor, told: bool) {
        let changed = (self.cursor, self.told) != (cursor, told);
        (self.cursor, self.told) = (cursor, told);
        if changed
            && let Some(file) = &self.file
            && let Err(error) = file.save(cursor, told)
        {
            tracing::error!(%error, "how far a task was read could not be kept");
        }
    }

    pub(crate) fn set_told(&mut self, told: bool) {
        self.set(self.cursor, told);
    }

    /// Lets another daemon have the task.
    pub(crate) fn release(&mut self) {
        self.released = true;
        self.file = None;
    }
}

impl Task {
    pub(crate) fn id(&self) -> String {
        format!("{KIND}-{}", self.number)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.borrow().is_some()
    }

    fn end(&self) -> Option<Arc<Ended>> {
        self.ended.borrow().clone()
    }

    /// When it ended.
    pub(crate) fn ended_at(&self) -> Option<SystemTime> {
        self.ended.borrow().as_ref().map(|ended| ended.at)
    }

    pub(crate) fn info(&self) -> TaskInfo {
        TaskInfo {
            task: self.id(),
            kind: KIND.to_owned(),
            label: self.label.clone(),
            session: self.session.clone(),
            lifetime: self.lifetime(),
            status: self.end().map_or(TaskStatus::Running, |ended| status(&ended.outcome)),
        }
    }

    pub(crate) fn lifetime(&self) -> Lifetime {
        if self.folder.is_some() {
            Lifetime::Detached
        } else {
            Lifetime::Session
        }
    }

    /// Whether `session` may know of it.
    pub(crate) fn is_visible_to(&self, session: Option<&str>) -> bool {
        self.session.is_none() || self.session.as_deref() == session
    }

    /// Waits for the end.
    pub(crate) async fn until_ended(&self) {
        // The sender is in the task itself, so it is not gone.
        let _ = self.ended.subscribe().wait_for(Option::is_some).await;
    }

    pub(crate) async fn wait(&self, wait: WaitFor, cursor: Cursor) {
        match wait {
            WaitFor::Nothing => {}
            WaitFor::End => self.until_ended().await,
            WaitFor::Output => {
                let mut news = self.feed.subscribe();
                while self.feed.since(cursor).next == cursor && !self.has_ended() {
                    if news.changed().await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    /// What was written since `cursor`, or since the last read without one.
    pub(crate) fn read(&self, cursor: Option<Cursor>) -> Result<TaskOutput, ExecError> {
        let ended = self.end();
        let mut reading = lock(&self.reading);
        if reading.released {
            return Err(shutting_down());
        }
        let delta = self.feed.since(cursor.unwrap_or(reading.cursor));
        let place = if cursor.is_none() { delta.next } else { reading.cursor };
        let told = reading.told || ended.is_some();
        reading.set(place, told);
        let outcome = ended.as_deref().map(|ended| &ended.outcome);
        let result = outcome.and_then(|outcome| outcome.as_ref().ok());
        let failed = outcome.and_then(|outcome| outcome.as_ref().err());
        Ok(TaskOutput {
            info: self.info(),
            stdout: delta.stdout,
            stderr: delta.stderr,
            next: delta.next,
            lossy: delta.lossy,
            spill_paths: self.files(ended.as_deref(), delta.lossy),
            mode: self.mode,
            runner_failed: failed.is_some_and(|error| error.code == ErrorCode::SandboxUnavailable),
            result: result.map(|result| Box::new(result.clone())),
        })
    }

    /// The files that have the whole streams.
    fn files(&self, ended: Option<&Ended>, lossy: bool) -> Vec<ByteString> {
        let Some(ended) = ended else {
            let growing = match &self.folder {
                _ if !lossy => Vec::new(),
                Some(folder) => folder.stream_files(),
                None => self.feed.files(),
            };
            return growing.into_iter().map(ByteString::from).collect();
        };
        match &ended.outcome {
            Ok(result) => [&result.stdout, &result.stderr]
                .into_iter()
                .filter_map(|stream| stream.spill_path.clone())
                .collect(),
            Err(_) => ended.salvaged.iter().cloned().map(ByteString::from).collect(),
        }
    }

    /// Removes the files of a task that nobody can read any more.
    pub(crate) async fn forget(&self) {
        if let Some(folder) = self.folder.clone() {
            // Its lock goes first, so that no other daemon finds half of it locked.
            lock(&self.reading).release();
            let _ = spawn_blocking(move || folder.remove()).await;
        } else if let Some(ended) = self.end()
            && let Ok(result) = &ended.outcome
        {
            run::discard(&[result.stdout.clone(), result.stderr.clone()]).await;
        }
    }
}

fn status(outcome: &Outcome) -> TaskStatus {
    match outcome {
        Ok(result) => match (&result.signal, result.exit_code) {
            (Some(signal), _) => TaskStatus::Killed {
                signal: Some(signal.clone()),
            },
            (None, Some(exit_code)) if !result.aborted => TaskStatus::Completed { exit_code },
            (None, _) => TaskStatus::Killed { signal: None },
        },
        Err(error) if error.code == ErrorCode::Cancelled => TaskStatus::Killed { signal: None },
        Err(error) => TaskStatus::Failed {
            reason: error.message.clone(),
        },
    }
}

/// The description, else the start of the command, on one line.
pub(crate) fn label(request: &BashExecRequest) -> String {
    let command = || request.command.display();
    let text = request
        .description
        .clone()
        .filter(|text| !text.trim().is_empty())
        .unwrap_or_else(command);
    let line: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut label: String = line.chars().take(LABEL).collect();
    if label.len() < line.len() {
        label.push('…');
    }
    label
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_one_short_line() {
        let of = |command: &str, description: Option<&str>| {
            label(&BashExecRequest {
                command: command.into(),
                description: description.map(str::to_owned),
                ..Default::default()
            })
        };
        assert_eq!(of("a\n  b", None), "a b");
        assert_eq!(of("a", Some("does a")), "does a");
        assert_eq!(of("a", Some(" ")), "a");
        assert_eq!(of(&"é".repeat(100), None), format!("{}…", "é".repeat(80)));
    }
}
