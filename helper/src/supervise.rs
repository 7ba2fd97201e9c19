//! Watches over one command from fork to the proof that nothing of it is left: one event loop over the control socket, signals, the child's report
//! and the notification listener, with every deadline.
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use dsh_policy::plan::{ExitStatus, Failure, FromHelper, Report, Step, ToHelper};
use dsh_policy::result::{Unenforced, Usage};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signalfd::SignalFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg};

use crate::channel::Channel;
use crate::launch::failure;
use crate::mediate::Mediator;
use crate::sys::{self, ChildReport, Listener, Taken};
use crate::tree;
use crate::world::World;

/// How long processes that were sent SIGKILL may take before they are counted as survivors (a process that waits in the kernel for a dead disk or
/// file server cannot be ended by anybody).
const KILL_LIMIT: Duration = Duration::from_secs(10);
/// Between two rounds of SIGKILL, when nothing else wakes the loop.
const KILL_ROUND: Duration = Duration::from_millis(1);

/// How a plan's command is ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Graces {
    /// Between SIGTERM and SIGKILL.
    pub(crate) kill: Duration,
    /// For descendants that outlive the shell.
    pub(crate) drain: Duration,
    /// For the set-up.
    pub(crate) setup: Duration,
    /// SIGHUP comes with SIGTERM: it has a terminal, and an interactive shell obeys only that.
    pub(crate) hang_up: bool,
}

/// One command under supervision.
pub(crate) struct Supervisor<'a, 'c> {
    channel: &'a mut Channel<'c>,
    signals: &'a SignalFd,
    mediator: Option<Mediator>,
    world: Rc<World>,
    listener: Option<Listener>,
    report: Option<OwnedFd>,
    graces: Graces,
    shell: i32,
    started: Instant,
    status: Option<ExitStatus>,
    /// The child said that every step is done.
    complete: bool,
    failed: Option<(Step, i32)>,
    /// A `Terminate` or `Kill` found the shell running.
    terminated: bool,
    /// When SIGKILL is due.
    kill_at: Option<Instant>,
    /// Since when SIGKILL is being sent.
    killing_since: Option<Instant>,
    empty: bool,
    daemon_gone: bool,
    announced: bool,
}

impl<'a, 'c> Supervisor<'a, 'c> {
    /// Takes over a child that has just been forked.
    pub(crate) fn new(
        channel: &'a mut Channel<'c>,
        signals: &'a SignalFd,
        (shell, report): (i32, OwnedFd),
        mediator: Option<Mediator>,
        world: Rc<World>,
        graces: Graces,
    ) -> Self {
        // Counted from the fork: the shell may be refused something before the news of its start has arrived here.
        let mediator = mediator.map(|mediator| mediator.started(shell));
        Self {
            channel,
            signals,
            mediator,
            world,
            listener: None,
            report: Some(report),
            graces,
            shell,
            started: Instant::now(),
            status: None,
            complete: false,
            failed: None,
            terminated: false,
            kill_at: None,
            killing_since: None,
            empty: false,
            daemon_gone: false,
            announced: false,
        }
    }

    /// Waits until the shell is executed, or a step has failed, or the deadline of the set-up has passed.
    pub(crate) fn set_up(&mut self) -> Result<(), Failure> {
        let deadline = self.started + self.graces.setup;
        while self.report.is_some() && self.failed.is_none() && Instant::now() < deadline {
            self.wait(Some(deadline));
        }
        let late = self.report.is_some();
        match self.failed {
            None if self.complete && !late => return Ok(()),
            _ => self.end_everything(),
        }
        Err(match self.failed {
            Some((step, errno)) => failure(step, errno, ""),
            None if late => failure(
                Step::Exec,
                libc::ETIMEDOUT,
                "the set-up did not end before its deadline",
            ),
            None => failure(Step::Exec, 0, "the process was ended during the set-up"),
        })
    }

    /// Tells the daemon that the shell runs.
    pub(crate) fn announce(&mut self, unenforced: Vec<Unenforced>, unobserved: Option<String>) {
        self.tell(&FromHelper::Started {
            pid: self.shell.cast_unsigned(),
            unenforced,
            unobserved,
        });
        self.announced = true;
        self.tell_of_refusals();
        if let Some(status) = self.status {
            self.tell(&FromHelper::ShellExited(status)); // It was quicker than the news of its start.
        }
    }

    /// Supervises until nothing is left of the command.
    pub(crate) fn run(&mut self) -> Report {
        while !self.empty {
            let now = Instant::now();
            if self.daemon_gone || self.kill_at.is_some_and(|at| at <= now) {
                break;
            }
            self.wait(self.kill_at);
        }
        self.end_everything();
        let survivors = if self.empty {
            0
        } else {
            u32::try_from(tree::descendants().len().max(1)).unwrap_or(u32::MAX)
        };
        let (denials, denials_dropped) = self.mediator.take().map(Mediator::into_facts).unwrap_or_default();
        Report {
            status: self.status.unwrap_or(ExitStatus::Signal(libc::SIGKILL)),
            terminated: self.terminated,
            denials,
            denials_dropped,
            survivors,
            usage: self.usage(),
        }
    }

    /// SIGKILL to everything, again and again, until there is no child left. Parked calls are still answered, so that nothing waits for us.
    fn end_everything(&mut self) {
        let since = *self.killing_since.get_or_insert_with(Instant::now);
        while !self.empty && since.elapsed() < KILL_LIMIT {
            tree::signal_all(libc::SIGKILL);
            self.collect();
            if !self.empty {
                self.wait(Some(Instant::now() + KILL_ROUND));
            }
        }
    }

    fn wait(&mut self, deadline: Option<Instant>) {
        let timeout =
            deadline.and_then(|deadline| Timespec::try_from(deadline.saturating_duration_since(Instant::now())).ok());
        let none = PollFlags::empty();
        let (mut control, mut signals, mut report, mut listener) = (none, none, none, none);
        {
            let writable = if self.channel.has_unsent() {
                PollFlags::OUT
            } else {
                PollFlags::empty()
            };
            let mut fds = Vec::with_capacity(4);
            let mut names = Vec::with_capacity(4);
            if let Some(fd) = &self.listener {
                fds.push(PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN));
                names.push(&mut listener);
            }
            fds.push(PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN));
            names.push(&mut signals);
            if !self.daemon_gone {
                fds.push(PollFd::from_borrowed_fd(self.channel.as_fd(), PollFlags::IN | writable));
                names.push(&mut control);
            }
            if let Some(fd) = &self.report {
                // The listener at once, because the child waits for that. Then only the end: the child is not interrupted at every word.
                let wanted = if self.awaits_listener() { PollFlags::IN } else { none };
                fds.push(PollFd::from_borrowed_fd(fd.as_fd(), wanted));
                names.push(&mut report);
            }
            if poll(&mut fds, timeout.as_ref()).is_err() {
                return; // Interrupted: the caller looks at its deadline and comes back.
            }
            for (fd, name) in fds.iter().zip(names) {
                *name = fd.revents();
            }
        }
        if listener.contains(PollFlags::IN) {
            self.mediate();
        } else if !listener.is_empty() {
            self.listener = None; // The last process that had the filter is gone.
        }
        if !report.is_empty() {
            while self.read_report() {}
        }
        if !signals.is_empty() {
            self.read_signals();
        }
        if !control.is_empty() {
            self.read_control();
        }
    }

    fn mediate(&mut self) {
        let (Some(listener), Some(mediator)) = (&self.listener, &mut self.mediator) else {
            return;
        };
        if let Err(error) = mediator.serve(listener) {
            // An outer filter forbids us to receive. Without answers every parked call would wait for ever; with the listener closed they fail.
            self.failed
                .get_or_insert((Step::Seccomp, error.raw_os_error().unwrap_or(0)));
            self.listener = None;
            return;
        }
        self.tell_of_refusals();
    }

    /// Events of refusals follow the news of the start, also those of a shell that was refused something before it.
    fn tell_of_refusals(&mut self) {
        while self.announced
            && let Some(fact) = self.mediator.as_mut().and_then(Mediator::take_event)
        {
            let sent = self.channel.send_if_idle(&FromHelper::Denial(Box::new(fact)));
            self.daemon_gone |= sent.is_err();
        }
    }

    fn awaits_listener(&self) -> bool {
        self.mediator.is_some() && self.listener.is_none()
    }

    /// Reads one word of the child's; says whether there may be more.
    fn read_report(&mut self) -> bool {
        let Some(report) = &self.report else { return false };
        let mut bytes = [0u8; 16];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(
            report,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
        )
        .map(|r| r.bytes);
        if received == Err(Errno::AGAIN) {
            return false;
        }
        let mut fd = None;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(mut rights) = message {
                fd = rights.next();
            }
        }
        match received
            .ok()
            .filter(|length| *length > 0)
            .and_then(|length| ChildReport::parse(&bytes[..length], fd))
        {
            Some(ChildReport::HasListener(number)) => self.take_listener(number),
            Some(ChildReport::Listener(fd)) => self.listener = Some(Listener::new(fd)),
            Some(ChildReport::Complete) => self.complete = true,
            Some(ChildReport::Failed(step, errno)) => {
                self.failed = Some((step, errno));
                self.report = None;
            }
            None => self.report = None,
        }
        self.report.is_some()
    }

    /// Takes the listener out of the child, which waits for the word that it may close it. Sending it would be a `sendmsg`, which is a notified call.
    fn take_listener(&mut self, number: i32) {
        let Some(report) = &self.report else { return };
        let word = if sys::can_take_descriptors() {
            match sys::take_descriptor(self.shell, self.shell, number) {
                Ok(fd) => self.listener = Some(Listener::new(fd)),
                Err(error) => {
                    self.failed = Some((Step::Seccomp, error.raw_os_error().unwrap_or(0)));
                    self.report = None;
                    return;
                }
            }
            Taken::Yes
        } else {
            Taken::Send
        };
        // A child that is gone says so by the end of its socket.
        let _ = rustix::net::send(report, word.word(), SendFlags::NOSIGNAL);
    }

    fn read_signals(&mut self) {
        while let Ok(Some(signal)) = self.signals.read_signal() {
            if signal.ssi_signo != libc::SIGCHLD.cast_unsigned() {
                // Somebody ends the helper: the command does not outlive it.
                self.kill_now();
            }
        }
        self.collect();
    }

    /// Reaps, and notices the end of the shell.
    fn collect(&mut self) {
        let reaped = tree::reap(self.shell);
        if let Some(status) = reaped.watched {
            self.status = Some(status);
            self.world.let_go();
            if self.announced {
                self.tell(&FromHelper::ShellExited(status));
            }
            let drained = Instant::now() + self.graces.drain;
            // After a `Terminate` the rest of the tree keeps the time that it was given.
            self.kill_at.get_or_insert(drained);
        }
        self.empty = reaped.empty;
    }

    fn read_control(&mut self) {
        if self.channel.flush().is_err() {
            self.daemon_gone = true;
        }
        match self.channel.receive() {
            Ok(messages) => messages.into_iter().for_each(|message| self.obey(&message)),
            Err(_) => self.daemon_gone = true,
        }
        if self.daemon_gone {
            self.kill_now();
        }
    }

    fn obey(&mut self, message: &ToHelper) {
        match message {
            ToHelper::Terminate if self.kill_at.is_none() => {
                self.note_termination();
                self.kill_at = Some(Instant::now() + self.graces.kill);
                if self.graces.hang_up {
                    tree::signal_all(libc::SIGHUP);
                }
                tree::signal_all(libc::SIGTERM);
                // A stopped process sees the signal only when it goes on.
                tree::signal_all(libc::SIGCONT);
            }
            ToHelper::Kill => self.kill_now(),
            ToHelper::Terminate | ToHelper::Run(_) => {}
        }
    }

    fn kill_now(&mut self) {
        self.note_termination();
        self.kill_at = Some(Instant::now());
    }

    fn note_termination(&mut self) {
        self.terminated |= self.status.is_none() && !sys::has_exited(self.shell);
    }

    fn tell(&mut self, message: &FromHelper) {
        self.daemon_gone |= self.channel.send(message).is_err();
    }

    fn usage(&self) -> Usage {
        let mut usage = Usage {
            wall_ms: milliseconds(self.started.elapsed()),
            ..Usage::default()
        };
        if let Ok(used) = getrusage(UsageWho::RUSAGE_CHILDREN) {
            let time = |t: nix::sys::time::TimeVal| {
                u64::try_from(t.tv_sec()).unwrap_or(0) * 1000 + u64::try_from(t.tv_usec()).unwrap_or(0) / 1000
            };
            usage.user_ms = time(used.user_time());
            usage.system_ms = time(used.system_time());
            usage.max_rss_kib = u64::try_from(used.max_rss()).unwrap_or(0);
        }
        usage
    }
}

/// Whole milliseconds.
pub(crate) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
