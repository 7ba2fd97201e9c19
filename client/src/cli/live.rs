//! A running command at a terminal: output as it comes, standard input as it is asked for, Ctrl-C as a cancel.
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::str::FromStr as _;

use dsh_policy::bytes::ByteString;
use dsh_policy::request::BashExecRequest;
use dsh_policy::result::BashRunResult;
use dsh_policy::wire::{ClientMessage, INPUT_WINDOW, ServerMessage, StreamName};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::print;
use crate::blocking::Client;
use crate::error::ClientError;

/// Written at once, so that a pipe that takes anything takes it without blocking.
const OUTPUT_CHUNK: usize = 4096;
/// After Ctrl-C a reader that does not read is waited for so long; what it misses is named.
const SLOW_READER: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// Bytes of standard input in one message.
const INPUT_CHUNK: usize = 32 * 1024;
/// No more standard input is read while so much is waiting for the daemon.
const BACKLOG: usize = 256 * 1024;

/// Where the command's standard input comes from.
#[derive(Debug)]
pub(super) struct Input(OwnedFd);

impl Input {
    /// A file, or `-` for this process's standard input.
    pub(super) fn open(path: &Path) -> Result<Self, ClientError> {
        let failed = |error: io::Error| {
            ClientError::Local(format!("cannot read standard input from {}: {error}", path.display()))
        };
        if path == Path::new("-") {
            return io::stdin().as_fd().try_clone_to_owned().map(Self).map_err(failed);
        }
        let file = File::open(path).map_err(failed)?;
        if file.metadata().map_err(failed)?.is_dir() {
            return Err(failed(io::ErrorKind::IsADirectory.into()));
        }
        Ok(Self(file.into()))
    }

    /// Everything at once, for a command that nobody stays to feed.
    pub(super) fn read_whole(self) -> Result<ByteString, ClientError> {
        use std::io::Read as _;
        let mut data = Vec::new();
        let read = File::from(self.0).read_to_end(&mut data);
        read.map_err(|error| ClientError::Local(format!("cannot read standard input: {error}")))?;
        Ok(ByteString(data))
    }
}

/// Bytes of a stream that were never shown because they came too fast.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Missed {
    /// Which stream.
    pub(super) stream: StreamName,
    /// How many.
    pub(super) bytes: u64,
}

/// How a run went, seen from here.
#[derive(Debug)]
pub(super) struct Outcome {
    /// What the daemon says.
    pub(super) result: BashRunResult,
    /// What was not shown.
    pub(super) missed: Vec<Missed>,
    /// A signal asked this process to stop.
    pub(super) interrupted: bool,
    /// Its number.
    pub(super) interrupted_by: u8,
    /// Why output could not be written to stdout.
    pub(super) stdout_failed: Option<ClientError>,
}

/// One stream's position.
#[derive(Debug, Default)]
struct Shown {
    next: u64,
    missed: u64,
    /// Its reader has been waited for in vain.
    stuck: bool,
}

/// A command that is running.
#[derive(Debug)]
pub(super) struct Live {
    client: Client,
    input: Option<Input>,
    /// Bytes of standard input that were sent, and that the command has taken.
    sent: u64,
    taken: u64,
    signals: SignalFd,
    stream: bool,
    id: u64,
    cancelled: bool,
    interrupted_by: u8,
    stdout_failed: Option<ClientError>,
    shown: [Shown; 2],
}

impl Live {
    /// Prepares signals; `stream` says whether output is shown as it comes.
    pub(super) fn new(mut client: Client, input: Option<Input>, stream: bool) -> Result<Self, ClientError> {
        let failed = |error: nix::Error| ClientError::Local(format!("cannot prepare for signals: {error}"));
        let watched = watched_signals();
        watched.thread_block().map_err(failed)?;
        let signals = SignalFd::with_flags(&watched, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC).map_err(failed)?;
        let id = client.new_id();
        Ok(Self {
            client,
            input,
            sent: 0,
            taken: 0,
            signals,
            stream,
            id,
            cancelled: false,
            interrupted_by: 0,
            stdout_failed: None,
            shown: [Shown::default(), Shown::default()],
        })
    }

    /// Runs to the end.
    pub(super) fn run(mut self, mut request: BashExecRequest) -> Result<Outcome, ClientError> {
        crate::ambient::attach(&mut request, &self.client.greeting().environment);
        let (id, stream) = (self.id, self.stream);
        self.client.send(&ClientMessage::Run {
            id,
            request: Box::new(request),
            stream,
        })?;
        loop {
            while let Some(message) = self.client.next_arrived()? {
                if let Some(result) = self.take(message)? {
                    return Ok(self.outcome(result));
                }
            }
            self.wait()?;
        }
    }

    fn outcome(mut self, result: BashRunResult) -> Outcome {
        let totals = [
            (StreamName::Stdout, result.stdout.bytes),
            (StreamName::Stderr, result.stderr.bytes),
        ];
        let missed = totals
            .into_iter()
            .zip(&self.shown)
            .filter_map(|((stream, total), shown)| {
                let bytes = shown.missed + total.saturating_sub(shown.next);
                (self.stream && self.stdout_failed.is_none() && bytes > 0).then_some(Missed { stream, bytes })
            });
        let missed = missed.collect();
        Outcome {
            missed,
            interrupted: self.interrupted_by != 0,
            interrupted_by: self.interrupted_by,
            stdout_failed: self.stdout_failed.take(),
            result,
        }
    }

    /// Waits for the daemon, a signal, or standard input.
    fn wait(&mut self) -> Result<(), ClientError> {
        let mut socket = PollFlags::IN;
        if self.client.backlog() > 0 {
            socket |= PollFlags::OUT;
        }
        let wants_input = self.client.backlog() < BACKLOG && self.input_room() > 0;
        let mut fds = vec![
            PollFd::new(&self.client, socket),
            PollFd::new(&self.signals, PollFlags::IN),
        ];
        if let Some(input) = self.input.as_ref().filter(|_| wants_input) {
            fds.push(PollFd::new(&input.0, PollFlags::IN));
        }
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(ClientError::Local(format!("cannot wait: {error}"))),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready[1] {
            self.interrupted()?;
        }
        if ready.get(2) == Some(&true) {
            self.forward_input()?;
        }
        if ready[0] {
            self.client.progress()?;
        }
        Ok(())
    }

    /// The first signal cancels; with the second this process leaves, and the daemon ends the command because its client has gone.
    fn interrupted(&mut self) -> Result<(), ClientError> {
        let Ok(Some(signal)) = self.signals.read_signal() else {
            return Ok(());
        };
        if self.interrupted_by != 0 {
            std::process::exit(128 + i32::from(self.interrupted_by));
        }
        self.interrupted_by = u8::try_from(signal.ssi_signo).unwrap_or(0);
        self.cancel()
    }

    fn cancel(&mut self) -> Result<(), ClientError> {
        if self.cancelled {
            return Ok(());
        }
        self.cancelled = true;
        self.client.send(&ClientMessage::Cancel { id: self.id })
    }

    /// More would keep the daemon from hearing a cancel.
    fn input_room(&self) -> usize {
        let under_way = self.sent.saturating_sub(self.taken);
        usize::try_from(u64::from(INPUT_WINDOW).saturating_sub(under_way)).unwrap_or(INPUT_CHUNK)
    }

    fn forward_input(&mut self) -> Result<(), ClientError> {
        let Some(input) = &self.input else { return Ok(()) };
        let mut chunk = vec![0; INPUT_CHUNK.min(self.input_room())];
        let count = match rustix::io::read(&input.0, &mut chunk[..]) {
            Ok(count) => count,
            Err(Errno::INTR | Errno::AGAIN) => return Ok(()),
            Err(error) => return Err(ClientError::Local(format!("cannot read standard input: {error}"))),
        };
        chunk.truncate(count);
        self.sent += count as u64;
        let eof = count == 0;
        if eof {
            self.input = None;
        }
        self.client.send(&ClientMessage::Stdin {
            id: self.id,
            data: ByteString(chunk),
            eof,
        })
    }

    /// Handles a message; the result when it is the last.
    fn take(&mut self, message: ServerMessage) -> Result<Option<BashRunResult>, ClientError> {
        match message {
            ServerMessage::Output {
                stream, offset, data, ..
            } => self.show(stream, offset, data.as_bytes())?,
            ServerMessage::InputTaken { bytes, .. } => self.taken = bytes,
            ServerMessage::Finished { result, .. } => return Ok(Some(*result)),
            ServerMessage::Error { error, .. } => return Err(ClientError::Exec(error)),
            _ => {}
        }
        Ok(None)
    }

    fn show(&mut self, stream: StreamName, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        let index = usize::from(stream == StreamName::Stderr);
        let shown = &mut self.shown[index];
        shown.missed += offset.saturating_sub(shown.next);
        shown.next = offset + data.len() as u64;
        let stuck = shown.stuck;
        if stream == StreamName::Stdout && self.stdout_failed.is_some() {
            return Ok(());
        }
        let written = match stream {
            StreamName::Stdout => self.write(rustix::stdio::stdout(), stuck, data)?,
            StreamName::Stderr => self.write(rustix::stdio::stderr(), stuck, data)?,
        };
        match written {
            Ok(count) => {
                let shown = &mut self.shown[index];
                shown.missed += (data.len() - count) as u64;
                shown.stuck |= count < data.len();
            }
            Err(error) if stream == StreamName::Stdout => {
                self.stdout_failed = Some(print::failed(error));
                self.cancel()?;
            }
            // A closed stderr is no reason to stop a command.
            Err(_) => {}
        }
        Ok(())
    }

    /// Writes as much as the reader takes, which is all of it unless Ctrl-C comes while it does not read. Signals are heard all the time.
    fn write(
        &mut self,
        fd: BorrowedFd<'_>,
        stuck: bool,
        data: &[u8],
    ) -> Result<rustix::io::Result<usize>, ClientError> {
        let mut written = 0;
        while written < data.len() {
            let patience = match (stuck, self.interrupted_by) {
                (true, _) => Some(Timespec::default()),
                (false, 0) => None,
                (false, _) => Some(SLOW_READER),
            };
            let (writable, signalled) = self.wait_for_reader(fd, patience)?;
            if writable {
                let end = data.len().min(written + OUTPUT_CHUNK);
                match rustix::io::write(fd, &data[written..end]) {
                    Ok(count) => written += count,
                    Err(Errno::INTR | Errno::AGAIN) => {}
                    Err(error) => return Ok(Err(error)),
                }
            } else if signalled {
                self.interrupted()?;
            } else if patience.is_some() {
                break;
            }
        }
        Ok(Ok(written))
    }

    /// Whether the reader takes something now, and whether a signal has come.
    fn wait_for_reader(&self, fd: BorrowedFd<'_>, patience: Option<Timespec>) -> Result<(bool, bool), ClientError> {
        let mut fds = [
            PollFd::from_borrowed_fd(fd, PollFlags::OUT),
            PollFd::new(&self.signals, PollFlags::IN),
        ];
        match poll(&mut fds, patience.as_ref()) {
            Ok(_) => Ok((!fds[0].revents().is_empty(), !fds[1].revents().is_empty())),
            Err(Errno::INTR) => Ok((false, false)),
            Err(error) => Err(ClientError::Local(format!("cannot wait: {error}"))),
        }
    }
}

impl Drop for Live {
    /// From here on a signal ends this process as usual.
    fn drop(&mut self) {
        let _ = watched_signals().thread_unblock();
    }
}

fn watched_signals() -> SigSet {
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect()
}

/// Number of a signal's name; 0 for one without a number here.
pub(super) fn signal_number(name: &str) -> u8 {
    Signal::from_str(name).map_or_else(
        |_| match name.strip_prefix("SIGRTMIN") {
            Some("") => 34,
            Some(offset) => offset.parse::<u8>().map_or(0, |offset| offset.saturating_add(34)),
            // The two that the C library keeps for itself.
            None => name
                .strip_prefix("signal ")
                .and_then(|number| number.parse().ok())
                .unwrap_or(0),
        },
        |signal| signal as u8,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_their_numbers() {
        assert_eq!(
            (
                signal_number("SIGKILL"),
                signal_number("SIGTERM"),
                signal_number("SIGRTMIN"),
                signal_number("SIGRTMIN+1"),
                signal_number("signal 32"),
                signal_number("?")
            ),
            (9, 15, 34, 35, 32, 0)
        );
    }
}
