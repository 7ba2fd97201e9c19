//! Background tasks: started by one client, read by any that may, ended with their session or with the daemon unless they are detached.
//!
//! A task settles once, first cause first. Its owner is told once that it has ended, unless it already knows.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use dsh_policy::mode::Lifetime;
use dsh_policy::task::{Cursor, TaskInfo, TaskOutput, WaitFor};
use dsh_policy::wire::ServerMessage;
use dsh_policy::{BashExecRequest, ErrorCode, ExecError};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::control::{self, Control, Stop};
use crate::detached;
use crate::feed::Feed;
use crate::helper::lock;
use crate::outbox::Outbox;
use crate::output::{Events, Sink};
use crate::run;
use crate::state::{State, shutting_down};
use crate::task::{Ended, KIND, Outcome, Reading, Task, label};
use crate::task_folder::About;

/// A read waits so long when it does not say how long.
const WAIT_DEFAULT: Duration = Duration::from_millis(30_000);
/// No read waits longer.
const WAIT_CAP: Duration = Duration::from_millis(600_000);
/// Output of tasks that have ended, in memory, all together. The oldest goes first; what was longer than a result's tail is in a file anyway.
const ENDED_ROOM: usize = 16 * 1024 * 1024;
/// Clients that are told of tasks that end.
const MAX_SUBSCRIBERS: usize = 1_024;

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
    /// Detached tasks whose keeper is not ready yet.
    starting: usize,
    tasks: BTreeMap<u64, Arc<Task>>,
    subscribers: Vec<Subscriber>,
    /// The daemon leaves and has let its detached tasks go.
    released: bool,
}

fn unknown(task: &str) -> ExecError {
    ExecError::new(ErrorCode::InvalidRequest, format!("unknown task {task}"))
}

/// What is refused of a background request whatever the daemon's state.
fn check(request: &mut BashExecRequest) -> Result<Lifetime, ExecError> {
    let invalid = |text: &str| Err(ExecError::new(ErrorCode::InvalidRequest, text));
    let lifetime = request.lifetime.unwrap_or(Lifetime::Session);
    if lifetime == Lifetime::Foreground {
        return invalid("a background command has the lifetime `session` or `detached`");
    }
    if request.stdin_open {
        return invalid("a background command has no open standard input; give it `stdin`");
    }
    request.lifetime = Some(lifetime);
    Ok(lifetime)
}

/// Counts a detached task that is being started.
struct Starting<'a>(&'a Tasks);

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        lock(&self.0.inner).starting -= 1;
    }
}

impl Tasks {
    /// Registers a task and starts its command; an error has left nothing behind.
    pub(crate) async fn start(&self, state: &Arc<State>, mut request: BashExecRequest) -> Result<TaskInfo, ExecError> {
        let lifetime = check(&mut request)?;
        run::check_startable(state, &request).await?;
        if state.is_draining() {
            return Err(shutting_down());
        }
        let settings = state.settings();
        let (limit, kept) = (settings.config.max_tasks, settings.config.kept_tasks);
        let asked = request.sandbox_policy.as_ref().and_then(|policy| policy.mode);
        let mut about = About {
            number: 0,
            label: label(&request),
            session: request.session.clone(),
            mode: asked.unwrap_or(settings.config.mode),
        };
        let (gone, _starting) = {
            let mut inner = lock(&self.inner);
            let running = inner.tasks.values().filter(|task| !task.has_ended()).count();
            if running + inner.starting >= limit {
                let text =
                    format!("{limit} background tasks are running; end one, or raise `maxTasks` in the configuration");
                return Err(ExecError::new(ErrorCode::LimitExceeded, text));
            }
            inner.last += 1;
            inner.starting += 1;
            about.number = inner.last;
            (inner.make_room(kept), Starting(self))
        };
        for task in gone {
            task.forget().await;
        }
        if lifetime == Lifetime::Detached && state.keeping.is_none() {
            let started = detached::start(state, &mut about, request).await?;
            return Ok(self.take_in(state, about, started));
        }
        let (task, control) = self.register(about, Arc::default(), Reading::default(), None);
        let info = task.info();
        let events = Events {
            sink: Sink::Task(Arc::clone(&task.feed)),
            id: task.number,
            stream: true,
        };
        let state = Arc::clone(state);
        tokio::spawn(async move {
            let outcome = run::run(&state, request, events, control).await;
            state.tasks.settle(&state, &task, outcome).await;
        });
        Ok(info)
    }

    /// Makes a detached task known whose keeper may live.
    pub(crate) fn take_in(&self, state: &Arc<State>, about: About, found: detached::Found) -> TaskInfo {
        let (feed, reading) = (Arc::default(), Reading::found(found.reader));
        let (task, control) = self.register(about, feed, reading, Some(found.folder));
        let info = task.info();
        let state = Arc::clone(state);
        tokio::spawn(async move {
            if let Some(ended) = detached::follow(&state, &task, found.keeper, control).await {
                state.tasks.announce(&task, ended).await;
            }
        });
        info
    }

    fn register(
        &self,
        about: About,
        feed: Arc<Feed>,
        reading: Reading,
        folder: Option<crate::task_folder::TaskFolder>,
    ) -> (Arc<Task>, Control) {
        let (handle, control) = control::pair(false);
        let task = Arc::new(Task {
            number: about.number,
            label: about.label,
            session: about.session,
            mode: about.mode,
            feed,
            handle,
            ended: watch::Sender::new(None),
            reading: Mutex::new(reading),
            folder,
        });
        let mut inner = lock(&self.inner);
        inner.last = inner.last.max(task.number);
        inner.tasks.insert(task.number, Arc::clone(&task));
        (task, control)
    }

    /// The next task has this number.
    pub(crate) fn begin_at(&self, number: u64) {
        lock(&self.inner).last = number - 1;
    }

    /// The task, for those who may know of it. To everybody else it does not exist.
    fn find(&self, session: Option<&str>, name: &str) -> Result<Arc<Task>, ExecError> {
        let number = name.strip_prefix(KIND).and_then(|rest| rest.strip_prefix('-'));
        let number = number.and_then(|number| number.parse::<u64>().ok());
        let inner = lock(&self.inner);
        number
            .and_then(|number| inner.tasks.get(&number).cloned())
            .filter(|task| task.id() == name && task.is_visible_to(session))
            .ok_or_else(|| if inner.released { shutting_down() } else { unknown(name) })
    }

    async fn settle(&self, state: &State, task: &Arc<Task>, outcome: Outcome) {
        if let Some(folder) = state.keeping.clone() {
            // Before anybody hears of it: what was told must be there after any kill.
            crate::keeper::keep(folder, &outcome).await;
        }
        let ended = Ended {
            outcome,
            at: SystemTime::now(),
            salvaged: Vec::new(),
        };
        self.announce(task, ended).await;
    }

    async fn announce(&self, task: &Arc<Task>, ended: Ended) {
        task.ended.send_replace(Some(Arc::new(ended)));
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
            let mut reading = lock(&task.reading);
            if reading.is_told() || !task.has_ended() {
                return;
            }
            reading.set_told(found.is_some());
            found
        };
        if let Some((outbox, id)) = subscriber {
            let notice = ServerMessage::Notice { id, task: task.info() };
            if outbox.send(&notice).await.is_err() {
                // The next one who asks hears of it instead.
                lock(&task.reading).set_told(false);
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
        let from = cursor.unwrap_or_else(|| lock(&task.reading).cursor);
        // A task that still runs when the time is over is left alone.
        let _ = timeout(limit, task.wait(wait, from)).await;
        task.read(cursor)
    }

    /// The tasks that a session may know of, oldest first.
    pub(crate) fn list(&self, session: Option<&str>) -> Vec<TaskInfo> {
        let inner = lock(&self.inner);
        let visible = inner.tasks.values().filter(|task| task.is_visible_to(session));
        visible.map(|task| task.info()).collect()
    }

    /// Asks for the end of a task; gives the task as it was before.
    pub(crate) fn kill(&self, session: Option<&str>, name: &str, reason: Option<&str>) -> Result<TaskInfo, ExecError> {
        let task = self.find(session, name)?;
        let info = task.info();
        if info.status.is_terminal() {
            lock(&task.reading).set_told(true);
        } else {
            tracing::info!(task = name, session, reason, "task is to end");
            task.handle.stop(Stop::Cancelled);
        }
        Ok(info)
    }

    /// Ends all tasks of a session but the detached ones, and waits until nothing of them is left. Gives how many there were.
    pub(crate) async fn end_session(&self, session: &str) -> u32 {
        let tasks = self.ending_with_the_daemon(|task| task.session.as_deref() == Some(session));
        for task in &tasks {
            lock(&task.reading).set_told(true);
            task.handle.stop(Stop::Cancelled);
        }
        for task in &tasks {
            task.until_ended().await;
            // Known until it is dead: limits and the daemon's idleness count it.
            lock(&self.inner).tasks.remove(&task.number);
            task.forget().await;
        }
        u32::try_from(tasks.len()).unwrap_or(u32::MAX)
    }

    /// Ends everything that is not detached: the daemon leaves.
    pub(crate) async fn end_all(&self, why: Stop) {
        let tasks = self.ending_with_the_daemon(|_| true);
        tasks.iter().for_each(|task| task.handle.stop(why));
        for task in tasks {
            task.until_ended().await;
            // Nobody can ask for it any more.
            task.forget().await;
        }
    }

    fn ending_with_the_daemon(&self, which: impl Fn(&Task) -> bool) -> Vec<Arc<Task>> {
        let inner = lock(&self.inner);
        let chosen = inner.tasks.values().filter(|task| task.folder.is_none() && which(task));
        chosen.cloned().collect()
    }

    /// Lets the next daemon have the detached tasks. From here on nothing is said of them.
    pub(crate) fn release_detached(&self) {
        let mut inner = lock(&self.inner);
        inner.released = true;
        inner.tasks.retain(|_, task| {
            if task.folder.is_some() {
                lock(&task.reading).release();
                task.handle.stop(Stop::ShuttingDown);
            }
            task.folder.is_none()
        });
    }

    /// Forgets tasks that ended longer ago than `age`.
    pub(crate) async fn expire(&self, age: Duration, now: SystemTime) {
        let is_old = |task: &Task| {
            let ago = task.ended_at().and_then(|at| now.duration_since(at).ok());
            ago.is_some_and(|ago| ago > age)
        };
        let old: Vec<Arc<Task>> = {
            let mut inner = lock(&self.inner);
            let old: Vec<u64> = inner
                .tasks
                .values()
                .filter(|task| is_old(task))
                .map(|task| task.number)
                .collect();
            old.iter().filter_map(|number| inner.tasks.remove(number)).collect()
        };
        for task in old {
            task.forget().await;
        }
    }

    /// Asks for the end of every task there is.
    pub(crate) fn stop_all(&self, why: Stop) {
        lock(&self.inner).tasks.values().for_each(|task| task.handle.stop(why));
    }

    /// Waits for the end of every task there is.
    pub(crate) async fn all_ended(&self) {
        let tasks: Vec<Arc<Task>> = lock(&self.inner).tasks.values().cloned().collect();
        for task in tasks {
            task.until_ended().await;
        }
    }

    /// How many are known.
    pub(crate) fn count(&self) -> usize {
        lock(&self.inner).tasks.len()
    }

    /// Whether one is running that would end with the daemon.
    pub(crate) fn any_running(&self) -> bool {
        let inner = lock(&self.inner);
        inner.starting > 0
            || inner
                .tasks
                .values()
                .any(|task| task.folder.is_none() && !task.has_ended())
    }
}

impl Inner {
    /// Lets go of the output of tasks that ended long ago.
    fn trim(&self) {
        let mut kept = 0;
        for task in self.tasks.values().rev().filter(|task| task.has_ended()) {
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
            .filter(|task| task.has_ended())
            .map(|task| task.number)
            .collect();
        let surplus = ended.len().saturating_sub(kept);
        let gone = ended[..surplus].iter();
        gone.filter_map(|number| self.tasks.remove(number)).collect()
    }
}
