//! A caller's session: its name, its workspace, and the mode that it was switched to. Nothing of one session is seen by another.
//!
//! Each switch is one event in an append-only log of JSON lines; the last one holds, also after a restart. A log belongs to one process at a time. It may be
//! shared with whatever else the caller writes as JSON lines, and even with other sessions: events of other kinds and other sessions are passed over.
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use dsh_policy::SandboxMode;
use serde::{Deserialize, Serialize};

use crate::tool::bash::Call;
use crate::tool::environment::CallContext;
use crate::tool::log::{EventLog, LogError, now_ms};
use crate::tool::prompt::standing_policy;

const SWITCHED: &str = "sandbox/mode";
const TOLD: &str = "sandbox/mode-told";

/// A session cannot be opened or switched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// A session without a name could be mixed up with another.
    #[error("a session needs a name")]
    NoName,
    /// Relative to what?
    #[error("the workspace of session \"{session}\" must be absolute, not {}", root.display())]
    RelativeRoot {
        /// Whose.
        session: String,
        /// What was given.
        root: PathBuf,
    },
    /// The log holds a switch to something that is no mode: what holds now cannot be told.
    #[error("the log {} of session \"{session}\" has a switch to an unknown mode ({event}); correct or remove that line", path.display())]
    UnknownMode {
        /// Whose.
        session: String,
        /// Which log.
        path: PathBuf,
        /// The event.
        event: String,
    },
    /// Its log cannot be used.
    #[error(transparent)]
    Log(#[from] LogError),
}

/// One line of the log.
#[derive(Debug, Serialize, Deserialize)]
struct ModeEvent {
    #[serde(rename = "type")]
    kind: String,
    session: String,
    /// None is the deployment's default again.
    mode: Option<SandboxMode>,
    #[serde(rename = "timeMs", default)]
    time_ms: u64,
}

/// What the log comes to.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    switched_to: Option<SandboxMode>,
    told: Option<SandboxMode>,
}

/// One session.
///
/// ```
/// use dsh_client::tool::session::Session;
/// use dsh_policy::SandboxMode;
///
/// let folder = tempfile::tempdir()?;
/// let log = folder.path().join("s1.jsonl");
/// let session = Session::open("s1", Some(folder.path().into()), Some(&log))?;
/// session.switch(Some(SandboxMode::WorkspaceWrite))?;
///
/// let after_a_restart = Session::open("s1", Some(folder.path().into()), Some(&log))?;
/// assert_eq!(after_a_restart.mode(), Some(SandboxMode::WorkspaceWrite));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Session {
    id: String,
    root: Option<PathBuf>,
    log: Option<EventLog>,
    state: Mutex<State>,
}

impl Session {
    /// Opens a session with its workspace, and replays its log. Without a log its mode does not survive this process.
    ///
    /// # Errors
    /// When the name is empty, the workspace relative, or the log cannot be read or holds a switch to an unknown mode.
    pub fn open(id: &str, root: Option<PathBuf>, log: Option<&Path>) -> Result<Self, SessionError> {
        if id.is_empty() {
            return Err(SessionError::NoName);
        }
        if let Some(root) = root.as_ref().filter(|root| !root.is_absolute()) {
            return Err(SessionError::RelativeRoot {
                session: id.to_owned(),
                root: root.clone(),
            });
        }
        let log = log.map(EventLog::open).transpose()?;
        let state = log.as_ref().map_or(Ok(State::default()), |log| replay(id, log))?;
        Ok(Self {
            id: id.to_owned(),
            root,
            log,
            state: Mutex::new(state),
        })
    }

    /// Its name.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Its workspace.
    #[must_use]
    pub fn root(&self) -> Option<&Path> {
        self.root.as_deref()
    }

    /// The absolute path of its log.
    #[must_use]
    pub fn log_path(&self) -> Option<&Path> {
        self.log.as_ref().map(EventLog::path)
    }

    /// Where a call with this `workdir` runs, as far as the session knows: an absolute one wins, a relative one starts at the workspace.
    /// None when that is the daemon's to say.
    #[must_use]
    pub fn workdir(&self, asked: Option<&str>) -> Option<PathBuf> {
        match (asked.map(Path::new), self.root()) {
            (Some(asked), _) if asked.is_absolute() => Some(asked.to_owned()),
            (Some(asked), Some(root)) => Some(root.join(asked)),
            (None, Some(root)) => Some(root.to_owned()),
            (_, None) => None,
        }
    }

    /// The mode that it was switched to; none when the deployment's default holds.
    #[must_use]
    pub fn mode(&self) -> Option<SandboxMode> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).switched_to
    }

    /// A call of this session's, on behalf of `agent`. None when the session has no workspace.
    #[must_use]
    pub fn call(&self, agent: Option<&str>) -> Option<Call> {
        Some(Call {
            workspace: self.root.clone()?,
            mode: self.mode(),
            agent: agent.map(str::to_owned),
            context: CallContext {
                session: Some(self.id.clone()),
                session_log: self.log_path().map(Path::to_owned),
            },
        })
    }

    /// Switches to `mode`, or with none back to the deployment's default. It holds for calls that begin after this returned.
    ///
    /// # Errors
    /// When the event cannot be written; then nothing has changed.
    pub fn switch(&self, mode: Option<SandboxMode>) -> Result<(), SessionError> {
        // Held while writing, so that the order in the log is the order of what held.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.write(SWITCHED, mode)?;
        state.switched_to = mode;
        Ok(())
    }

    /// What the model has to be told, when it has not been told so yet: once at first, then once for each change, also over restarts.
    /// `default` is the deployment's mode.
    ///
    /// # Errors
    /// When it cannot be written down that it was told; then it was not.
    pub fn policy_message(&self, default: SandboxMode) -> Result<Option<String>, SessionError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mode = state.switched_to.unwrap_or(default);
        if state.told == Some(mode) {
            return Ok(None);
        }
        self.write(TOLD, Some(mode))?;
        state.told = Some(mode);
        Ok(Some(standing_policy(mode)))
    }

    fn write(&self, kind: &str, mode: Option<SandboxMode>) -> Result<(), LogError> {
        let Some(log) = &self.log else {
            return Ok(());
        };
        log.append(&ModeEvent {
            kind: kind.to_owned(),
            session: self.id.clone(),
            mode,
            time_ms: now_ms(),
        })
    }
}

fn replay(id: &str, log: &EventLog) -> Result<State, SessionError> {
    let mut state = State::default();
    for value in log.events()? {
        let (kind, session) = (value["type"].as_str(), value["session"].as_str());
        if session != Some(id) || !matches!(kind, Some(SWITCHED | TOLD)) {
            continue;
        }
        let event = serde_json::from_value::<ModeEvent>(value.clone()).map_err(|_| SessionError::UnknownMode {
            session: id.to_owned(),
            path: log.path().to_owned(),
            event: value.to_string(),
        })?;
        if event.kind == SWITCHED {
            state.switched_to = event.mode;
        } else {
            state.told = event.mode;
        }
    }
    Ok(state)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use SandboxMode::{DangerFullAccess, ReadOnly, WorkspaceWrite};
    use std::fs;

    fn open(id: &str, log: &Path) -> Session {
        Session::open(id, None, Some(log)).unwrap()
    }

    #[test]
    fn the_last_switch_holds_also_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("s.jsonl");
        let session = open("a", &log);
        assert_eq!(session.mode(), None);
        for mode in [
            Some(WorkspaceWrite),
            Some(DangerFullAccess),
            Some(ReadOnly),
            None,
            Some(WorkspaceWrite),
        ] {
            session.switch(mode).unwrap();
            assert_eq!((session.mode(), open("a", &log).mode()), (mode, mode));
        }
        assert_eq!(
            fs::read_to_string(&log).unwrap().lines().count(),
            5,
            "one event for each switch"
        );
    }

    #[test]
    fn a_switch_that_was_cut_short_did_not_happen() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("s.jsonl");
        open("a", &log).switch(Some(WorkspaceWrite)).unwrap();
        let whole = fs::read(&log).unwrap();
        open("a", &log).switch(Some(DangerFullAccess)).unwrap();
        let both = fs::read(&log).unwrap();
        for length in whole.len()..both.len() {
            fs::write(&log, &both[..length]).unwrap();
            let session = open("a", &log);
            // The last byte is only the newline: without it the event is whole.
            let expected = if length == both.len() - 1 {
                DangerFullAccess
            } else {
                WorkspaceWrite
            };
            assert_eq!(session.mode(), Some(expected), "{length}");
            session.switch(Some(ReadOnly)).unwrap();
            assert_eq!(open("a", &log).mode(), Some(ReadOnly), "{length}");
        }
    }

    #[test]
    fn two_sessions_never_mix_even_in_one_log_with_other_lines() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("s.jsonl");
        fs::write(&log, "{\"type\":\"user\",\"text\":\"hi\"}\nno json\n[1]\n").unwrap();
        let (a, b) = (open("a", &log), open("b", &log));
        a.switch(Some(DangerFullAccess)).unwrap();
        assert_eq!((a.mode(), b.mode()), (Some(DangerFullAccess), None));
        b.switch(Some(WorkspaceWrite)).unwrap();
        assert_eq!(
            (open("a", &log).mode(), open("b", &log).mode(), open("c", &log).mode()),
            (Some(DangerFullAccess), Some(WorkspaceWrite), None)
        );
    }

    #[test]
    fn a_switch_that_cannot_be_understood_is_an_error_not_a_guess() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("s.jsonl");
        let line = r#"{"mode":"wide","session":"a","type":"sandbox/mode"}"#;
        fs::write(&log, format!("{line}\n")).unwrap();
        let error = Session::open("a", None, Some(&log)).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "the log {} of session \"a\" has a switch to an unknown mode ({line}); correct or remove that line",
                log.display()
            )
        );
        assert_eq!(open("b", &log).mode(), None, "another session's trouble");
    }

    #[test]
    fn a_switch_that_cannot_be_written_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("s.jsonl");
        let mut session = open("a", &log);
        session.log = Some(EventLog::read_only(&log).unwrap());
        let error = session.switch(Some(DangerFullAccess)).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("cannot use the log {}: Bad file descriptor (os error 9)", log.display())
        );
        assert_eq!(session.mode(), None);
    }

    #[test]
    fn the_model_is_told_once_for_each_change() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("s.jsonl");
        let session = open("a", &log);
        let told = |session: &Session| session.policy_message(ReadOnly).unwrap();
        assert_eq!(told(&session), Some(standing_policy(ReadOnly)));
        assert_eq!(told(&session), None);
        session.switch(Some(ReadOnly)).unwrap();
        assert_eq!(told(&session), None, "a switch to what holds is no change");
        session.switch(Some(WorkspaceWrite)).unwrap();
        assert_eq!(told(&session), Some(standing_policy(WorkspaceWrite)));
        let again = open("a", &log);
        assert_eq!(told(&again), None, "the conversation has it already");
        again.switch(None).unwrap();
        assert_eq!(told(&again), Some(standing_policy(ReadOnly)));
    }

    #[test]
    fn a_session_has_a_name_and_an_absolute_workspace() {
        assert_eq!(
            Session::open("", None, None).unwrap_err().to_string(),
            "a session needs a name"
        );
        assert_eq!(
            Session::open("a", Some("work".into()), None).unwrap_err().to_string(),
            "the workspace of session \"a\" must be absolute, not work"
        );
        let session = Session::open("a", Some("/w".into()), None).unwrap();
        for (asked, expected) in [(None, "/w"), (Some("sub"), "/w/sub"), (Some("/x"), "/x")] {
            assert_eq!(session.workdir(asked), Some(expected.into()));
        }
        assert_eq!(session.call(None).unwrap().workspace, Path::new("/w"));
        let nowhere = Session::open("a", None, None).unwrap();
        assert!(nowhere.workdir(Some("sub")).is_none() && nowhere.call(None).is_none());
    }
}
