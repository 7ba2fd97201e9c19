//! Background tasks: started by one client, read by any that may, ended with their session or with the daemon.
//!
//! A task settles once, first cause first. Its owner is told once that it has ended, unless it already knows.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dsh_policy::mode::SandboxMode;
use dsh_policy::task::{Cursor, TaskInfo, TaskOutput, TaskStatus, WaitFor};
use dsh_policy::wire::ServerMessage;
use dsh_policy::{BashExecRequest, BashRunResult, ErrorCode, ExecError};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::control::{self, Handle, Stop};
use crate::feed::Feed;
use crate::helper::lock;
use crate::outbox::Outbox;
use crate::output::{Events, Sink};
use crate::run;
use crate::state::{State, shutting_down};

/// A read waits so long when it does not say how long.
const WAIT_DEFAULT: Duration = Duration::from_millis(30_000);
/// No read waits longer.
const WAIT_CAP: Duration = Duration::from_millis(600_000);
const KIND: &str = "bash";
/// Output of tasks that have ended, in memory, all together. The oldest goes first; what was longer than a result's tail is in a file anyway.
const ENDED_ROOM: usize = 16 * 1024 * 1024;
/// Clients that are told of tasks that end.
const MAX_SUBSCRIBERS: usize = 1_024;
/// Characters of a command that serve as its label.
const LABEL: usize = 80;

/// One task.
pub(crate) struct Task {
    number: u64,
    label: String,
    session: Option<String>,
    mode: SandboxMode,
    feed: Arc<Feed>,
    handle: Handle,
    /// Set once, at the end.
    outcome: watch::Sender<Option<Arc<Outcome>>>,
    state: Mutex<Reading>,
}

/// What became of a task.
type Outcome = Result<BashRunResult, ExecError>;

#[derive(Debug, Default)]
struct Reading {
    /// Where the consuming reader is.
    cursor: Cursor,
    /// Whoever owns it knows that it has ended.
    told: bool,
}

/// Clients that want to hear of the end of tasks.
struct Subscriber {
    outbox: Outbox,
    id: u64,
    session: Option<String>,
}

/// All tasks of a daemon.
#[derive(Default)]
pub(crate) struct Tasks {
    inner: Mutex<Inner>,
}

impl std::fmt::Debug for Tasks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tasks").field("count", &self.count()).finish()
    }
}

#[derive(Default)]
struct Inner {
    last: u64,
    tasks: BTreeMap<u64, Arc<Task>>,
    subscribers: Vec<Subscriber>,
}

fn unknown(task: &str) -> ExecError {
    ExecError::new(ErrorCode::InvalidRequest, format!("unknown task {task}"))
}

impl Task {
    fn id(&self) -> String {
        format!("{KIND}-{}", self.number)
    }

    fn outcome(&self) -> Option<Arc<Outcome>> {
        self.outcome.borrow().clone()
    }

    fn info(&self) -> TaskInfo {
        TaskInfo {
            task: self.id(),
            kind: KIND.to_owned(),
            label: self.label.clone(),
            session: self.session.clone(),
            status: self.outcome().map_or(TaskStatus::Running, |outcome| status(&outcome)),
        }
    }

    /// Waits for the end.
    async fn ended(&self) {
        // The sender is in the task itself, so it is not gone.
        let _ = self.outcome.subscribe().wait_for(Option::is_some).await;
    }

    async fn wait(&self, wait: WaitFor, cursor: Cursor) {
        match wait {
            WaitFor::Nothing => {}
            WaitFor::End => self.ended().await,
            WaitFor::Output => {
                let mut news = self.feed.subscribe();
                while self.feed.since(cursor).next == cursor && self.outcome().is_none() {
                    if news.changed().await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    fn read(&self, cursor: Option<Cursor>) -> TaskOutput {
        let outcome = self.outcome();
        let mut state = lock(&self.state);
        let delta = self.feed.since(cursor.unwrap_or(state.cursor));
        if cursor.is_none() {
            state.cursor = delta.next;
        }
        state.told |= outcome.is_some();
        let result = outcome.as_deref().and_then(|outcome| outcome.as_ref().ok());
        let spilled = result.iter().flat_map(|result| [&result.stdout, &result.stderr]);
        let failed = outcome.as_deref().and_then(|outcome| outcome.as_ref().err());
        TaskOutput {
            info: self.info(),
            stdout: delta.stdout,
            stderr: delta.stderr,
            next: delta.next,
            lossy: delta.lossy,
            spill_paths: spilled.filter_map(|stream| stream.spill_path.clone()).collect(),
            mode: self.mode,
            runner_failed: failed.is_some_and(|error| error.code == ErrorCode::SandboxUnavailable),
            result: result.map(|result| Box::new(result.clone())),
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

impl Tasks {
    /// Registers a task and starts its command; an error has left nothing behind.
    pub(crate) async fn start(&self, state: &Arc<State>, mut request: BashExecRequest) -> Result<TaskInfo, ExecError> {
        use dsh_policy::mode::Lifetime;
        let invalid = |text: &str| ExecError::new(ErrorCode::InvalidRequest, text);
        match request.lifetime {
            None | Some(Lifetime::Session) => request.lifetime = Some(Lifetime::Session),
            Some(Lifetime::Foreground) => return Err(invalid("a background command has the lifetime `session`")),
            Some(Lifetime::Detached) => {
                return Err(invalid(
                    "the lifetime `detached` is not part of this version; use `session`",
                ));
            }
        }
        if request.stdin_open {
            return Err(invalid(
                "a background command has no open standard input; give it `stdin`",
            ));
        }
        run::check_startable(state, &request).await?;
        if state.is_draining() {
            return Err(shutting_down());
        }
        let settings = state.settings();
        let (limit, kept) = (settings.config.max_tasks, settings.config.kept_tasks);
        let mut inner = lock(&self.inner);
        let running = inner.tasks.values().filter(|task| task.outcome().is_none()).count();
        if running >= limit {
            let text =
                format!("{limit} background tasks are running; end one, or raise `maxTasks` in the configuration");
            return Err(ExecError::new(ErrorCode::LimitExceeded, text));
        }
        let gone = inner.make_room(kept);
        let (handle, control) = control::pair(false);
        let asked = request.sandbox_policy.as_ref().and_then(|policy| policy.mode);
        inner.last += 1;
        let task = Arc::new(Task {
            number: inner.last,
            label: label(&request),
            session: request.session.clone(),
            mode: asked.unwrap_or(settings.config.mode),
            feed: Arc::new(Feed::new()),
            handle,
            outcome: watch::Sender::new(None),
            state: Mutex::default(),
        });
        inner.tasks.insert(task.number, Arc::clone(&task));
        drop(inner);
        let info = task.info();
        let events = Events {
            sink: Sink::Task(Arc::clone(&task.feed)),
            id: task.number,
            stream: true,
        };
        let state = Arc::clone(state);
        tokio::spawn(async move {
            for task in gone {
                forget(&task).await;
            }
            let outcome = run::run(&state, request, events, control).await;
            state.tasks.settle(&task, outcome).await;
        });
        Ok(info)
    }

    /// The task, for those who may know of it. To everybody else it does not exist.
    fn find(&self, session: Option<&str>, name: &str) -> Result<Arc<Task>, ExecError> {
        let number = name.strip_prefix(KIND).and_then(|rest| rest.strip_prefix('-'));
        let number = number.and_then(|number| number.parse::<u64>().ok());
        number
            .and_then(|number| lock(&self.inner).tasks.get(&number).cloned())
            .filter(|task| task.id() == name && (task.session.is_none() || task.session.as_deref() == session))
            .ok_or_else(|| unknown(name))
    }

    async fn settle(&self, task: &Arc<Task>, outcome: Outcome) {
        task.outcome.send_replace(Some(Arc::new(outcome)));
        task.feed.wake();
        lock(&self.inner).trim();
        tracing::info!(
            task = task.id(),
            session = task.session,
            status = %task.info().status,
            "task ended"
        );
        // A read that was waiting for this tells its owner itself; give it the turn.
        tokio::task::yield_now().await;
        self.notify(task).await;
    }

    /// Tells a subscriber, when there is one and nobody has been told.
    async fn notify(&self, task: &Task) {
        let subscriber = {
            let mut inner = lock(&self.inner);
            inner.subscribers.retain(|subscriber| !subscriber.outbox.is_closed());
            let mut fitting = inner
                .subscribers
                .iter()
                .filter(|subscriber| subscriber.session == task.session);
            let found = fitting
                .next()
                .map(|subscriber| (subscriber.outbox.clone(), subscriber.id));
            let mut state = lock(&task.state);
            if state.told || task.outcome().is_none() {
                return;
            }
            state.told = found.is_some();
            found
        };
        if let Some((outbox, id)) = subscriber {
            let notice = ServerMessage::Notice { id, task: task.info() };
            if outbox.send(&notice).await.is_err() {
                // The next one who asks hears of it instead.
                lock(&task.state).told = false;
            }
        }
    }

    /// From now on `outbox` hears of tasks of `session` that end, and of those that nobody has heard of.
    pub(crate) async fn subscribe(&self, outbox: Outbox, id: u64, session: Option<String>) -> Result<(), ExecError> {
        let waiting: Vec<Arc<Task>> = {
            let mut inner = lock(&self.inner);
            inner.subscribers.retain(|subscriber| !subscriber.outbox.is_closed());
            if inner.subscribers.len() >= MAX_SUBSCRIBERS {
                let text = format!("{MAX_SUBSCRIBERS} clients hear of tasks already");
                return Err(ExecError::new(ErrorCode::LimitExceeded, text));
            }
            let tasks = inner.tasks.values().filter(|task| task.session == session);
            let waiting = tasks.cloned().collect();
            inner.subscribers.push(Subscriber { outbox, id, session });
            waiting
        };
        for task in waiting {
            self.notify(&task).await;
        }
        Ok(())
    }

    /// What a task has written, after waiting for what `wait` says.
    pub(crate) async fn read(
        &self,
        session: Option<&str>,
        name: &str,
        cursor: Option<Cursor>,
        wait: WaitFor,
        timeout_ms: Option<u64>,
    ) -> Result<TaskOutput, ExecError> {
        let task = self.find(session, name)?;
        let limit = timeout_ms.map_or(WAIT_DEFAULT, Duration::from_millis).min(WAIT_CAP);
        let from = cursor.unwrap_or_else(|| lock(&task.state).cursor);
        // A task that still runs when the time is over is left alone.
        let _ = timeout(limit, task.wait(wait, from)).await;
        Ok(task.read(cursor))
    }

    /// The tasks that a session may know of, oldest first.
    pub(crate) fn list(&self, session: Option<&str>) -> Vec<TaskInfo> {
        let inner = lock(&self.inner);
        let visible = inner
            .tasks
            .values()
            .filter(|task| task.session.is_none() || task.session.as_deref() == session);
        visible.map(|task| task.info()).collect()
    }

    /// Asks for the end of a task; gives the task as it was before.
    pub(crate) fn kill(&self, session: Option<&str>, name: &str, reason: Option<&str>) -> Result<TaskInfo, ExecError> {
        let task = self.find(session, name)?;
        let info = task.info();
        if info.status.is_terminal() {
            lock(&task.state).told = true;
        } else {
            tracing::info!(task = name, session, reason, "task is to end");
            task.handle.stop(Stop::Cancelled);
        }
        Ok(info)
    }

    /// Ends all tasks of a session and waits until nothing of them is left. Gives how many there were.
    pub(crate) async fn end_session(&self, session: &str) -> u32 {
        let tasks: Vec<Arc<Task>> = {
            let inner = lock(&self.inner);
            let of_session = inner
                .tasks
                .values()
                .filter(|task| task.session.as_deref() == Some(session));
            of_session.cloned().collect()
        };
        for task in &tasks {
            lock(&task.state).told = true;
            task.handle.stop(Stop::Cancelled);
        }
        for task in &tasks {
            task.ended().await;
            // Known until it is dead: limits and the daemon's idleness count it.
            lock(&self.inner).tasks.remove(&task.number);
            forget(task).await;
        }
        u32::try_from(tasks.len()).unwrap_or(u32::MAX)
    }

    /// Ends everything: the daemon leaves.
    pub(crate) async fn end_all(&self) {
        let tasks: Vec<Arc<Task>> = lock(&self.inner).tasks.values().cloned().collect();
        tasks.iter().for_each(|task| task.handle.stop(Stop::ShuttingDown));
        for task in tasks {
            task.ended().await;
            // Nobody can ask for it any more.
            forget(&task).await;
        }
    }

    /// How many are known.
    pub(crate) fn count(&self) -> usize {
        lock(&self.inner).tasks.len()
    }

    /// Whether one is running.
    pub(crate) fn any_running(&self) -> bool {
        lock(&self.inner).tasks.values().any(|task| task.outcome().is_none())
    }
}

impl Inner {
    /// Lets go of the output of tasks that ended long ago.
    fn trim(&self) {
        let mut kept = 0;
        for task in self.tasks.values().rev().filter(|task| task.outcome().is_some()) {
            kept += task.feed.size();
            if kept > ENDED_ROOM {
                task.feed.clear();
            }
        }
    }

    /// Takes out the oldest tasks that have ended, so that at most `kept` of those stay.
    fn make_room(&mut self, kept: usize) -> Vec<Arc<Task>> {
        let ended: Vec<u64> = self
            .tasks
            .values()
            .filter(|task| task.outcome().is_some())
            .map(|task| task.number)
            .collect();
        let surplus = ended.len().saturating_sub(kept);
        let gone = ended[..surplus].iter();
        gone.filter_map(|number| self.tasks.remove(number)).collect()
    }
}

/// Removes the files of a task that nobody can read any more.
async fn forget(task: &Task) {
    if let Some(outcome) = task.outcome()
        && let Ok(result) = outcome.as_ref()
    {
        run::discard(&[result.stdout.clone(), result.stderr.clone()]).await;
    }
}

/// The description, else the start of the command, on one line.
fn label(request: &BashExecRequest) -> String {
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
