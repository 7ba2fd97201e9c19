//! The accept loop: who may connect, how many, when the daemon leaves, and that nothing is left behind then.
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use dsh_policy::{ErrorCode, ExecError};
use rustix::process::geteuid;
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::control::Stop;
use crate::notify::{self, Notice};
use crate::state::State;
use crate::{connection, logging, reap};

/// After an error that is about resources, accepting waits so long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// What leaving may take beyond the graces of the commands.
const DRAIN_SLACK: Duration = Duration::from_secs(5);
/// How often old spill files are looked for.
const CLEAN_EVERY: Duration = Duration::from_secs(600);

/// What the daemon gives up when it no longer wants clients: the socket's name, then the lock.
pub(crate) trait Address {
    /// Nobody can connect from here on.
    fn give_up(&mut self);
}

/// Serves until a signal or idleness ends it.
pub(crate) async fn run(
    listener: UnixListener,
    state: Arc<State>,
    idle_exit: Option<Duration>,
    address: &mut impl Address,
) -> io::Result<()> {
    let mut signals = Signals::new()?;
    let mut clients = JoinSet::new();
    prepare_in_background(&state);
    let mut clean = tokio::time::interval(CLEAN_EVERY);
    let mut idle_since = Instant::now();
    notify::send(Notice::Ready);
    loop {
        let idle_until = idle_exit.filter(|_| clients.is_empty()).map(|idle| idle_since + idle);
        let busy = state.tasks.any_running();
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => admit(&state, stream, &mut clients),
                Err(error) => pause_after(&error).await,
            },
            Some(_) = clients.join_next() => idle_since = Instant::now(),
            _ = clean.tick() => {
                let state = Arc::clone(&state);
                let hours = state.settings().config.kept_task_hours;
                tokio::spawn(async move {
                    let age = Duration::from_secs(hours.saturating_mul(3_600));
                    state.tasks.expire(age, SystemTime::now()).await;
                    tokio::task::spawn_blocking(move || state.clean_spill());
                });
            }
            // A task keeps the daemon; when it ends is looked at again after the time of an idle daemon.
            () = sleep_until(idle_until.unwrap_or_else(Instant::now)), if idle_until.is_some() && busy => {
                idle_since = Instant::now();
            }
            () = sleep_until(idle_until.unwrap_or_else(Instant::now)), if idle_until.is_some() && !busy => {
                tracing::info!("leaving: nobody has been connected for a while");
                state.tasks.release_detached();
                address.give_up();
                serve_late_comers(&listener, &state, &mut clients).await;
                break;
            }
            request = signals.next() => match request {
                Request::Reload => reload(&state).await,
                Request::Leave => break,
            },
        }
    }
    leave(listener, &state, clients, address).await;
    Ok(())
}

/// What a signal asks for.
enum Request {
    Leave,
    Reload,
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Request {
        tokio::select! {
            _ = self.terminate.recv() => Request::Leave,
            _ = self.interrupt.recv() => Request::Leave,
            _ = self.hang_up.recv() => Request::Reload,
        }
    }
}

/// The probe and the first ready helpers: a first request need not wait for more than it needs.
fn prepare_in_background(state: &Arc<State>) {
    let state = Arc::clone(state);
    tokio::spawn(async move {
        let helpers = state.settings().config.helpers;
        let refill = state.helpers.refill(helpers);
        let _ = tokio::join!(state.probe.refresh(&state.helpers), refill);
    });
}

fn admit(state: &Arc<State>, stream: UnixStream, clients: &mut JoinSet<()>) {
    let refusal = match stream.peer_cred() {
        Ok(peer) if peer.uid() != geteuid().as_raw() => {
            // Nothing is said to other users, not even no.
            tracing::warn!(uid = peer.uid(), "a connection of another user is refused");
            return;
        }
        Ok(peer) => refusal(state, peer.pid()),
        Err(error) => {
            tracing::warn!(%error, "a peer without credentials is refused");
            return;
        }
    };
    let state = Arc::clone(state);
    clients.spawn(async move {
        state.connections.fetch_add(1, Ordering::Relaxed);
        connection::serve(Arc::clone(&state), stream, refusal).await;
        state.connections.fetch_sub(1, Ordering::Relaxed);
    });
}

/// Why a client of this user is not served.
fn refusal(state: &State, pid: Option<i32>) -> Option<ExecError> {
    let limit = state.settings().config.max_connections;
    if state.connections.load(Ordering::Relaxed) as usize >= limit {
        let text = format!("{limit} clients are connected; raise `maxConnections` in the configuration");
        return Some(ExecError::new(ErrorCode::LimitExceeded, text));
    }
    if pid.is_some_and(|pid| is_confined(state, pid)) {
        let text = "a confined command cannot ask the daemon that confines it to run others: it could leave its own confinement";
        tracing::warn!(pid, "a command tried to connect");
        return Some(ExecError::new(ErrorCode::InvalidRequest, text));
    }
    None
}

/// Helpers are subreapers, so all that a command starts stays below its helper.
fn is_confined(state: &State, mut pid: i32) -> bool {
    while pid > 1 && state.helpers.confine_any() {
        if state.helpers.confines(pid) {
            return true;
        }
        match reap::parent_of(pid) {
            Some(parent) => pid = parent,
            None => return false,
        }
    }
    false
}

/// An error of one connection is not one of the daemon; being out of descriptors or memory passes.
pub(crate) async fn pause_after(error: &io::Error) {
    tracing::warn!(%error, "a connection could not be accepted");
    sleep(ACCEPT_PAUSE).await;
}

/// Clients that connected just before the socket's name went are served like others; nobody can follow them.
async fn serve_late_comers(listener: &UnixListener, state: &Arc<State>, clients: &mut JoinSet<()>) {
    while let Ok(Ok((stream, _))) = timeout(Duration::from_millis(1), listener.accept()).await {
        admit(state, stream, clients);
    }
    while clients.join_next().await.is_some() {}
}

async fn reload(state: &Arc<State>) {
    notify::send(Notice::Reloading);
    match state.reload() {
        Ok(()) => {
            logging::start(state.settings().config.log_level.into());
            tracing::info!("the configuration was read again");
        }
        Err(error) => tracing::error!(%error, "the configuration in force stays"),
    }
    prepare_in_background(state);
    notify::send(Notice::Ready);
}

/// Ends what runs, waits for the answers to be delivered, removes what is the daemon's.
async fn leave(listener: UnixListener, state: &Arc<State>, mut clients: JoinSet<()>, address: &mut impl Address) {
    notify::send(Notice::Stopping);
    // Before another daemon can begin: it must find them free.
    state.tasks.release_detached();
    address.give_up();
    drop(listener);
    state.draining.send_replace(true);
    let deployment = &state.settings().deployment;
    let graces = Duration::from_millis(deployment.kill_grace_ms + deployment.drain_grace_ms);
    let drained = timeout(graces + DRAIN_SLACK, async {
        tokio::join!(state.tasks.end_all(Stop::ShuttingDown), async {
            while clients.join_next().await.is_some() {}
        });
    });
    if drained.await.is_err() {
        tracing::error!(clients = clients.len(), "leaving although not everything has ended");
    }
    state.helpers.drain().await;
    state.tmpdirs.end();
    tracing::info!("left");
}
