//! A running command at a terminal: output as it comes, standard input as it is asked for, Ctrl-C as a cancel.
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::str::FromStr as _;

use dsh_policy::bytes::ByteString;
use dsh_policy::request::BashExecRequest;
use dsh_policy::result::BashRunResult;
use dsh_policy::wire::{ClientMessage, ServerMessage, StreamName};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, poll};

use crate::blocking::Client;
use crate::error::ClientError;

/// Number of the signal for a closed pipe.
pub(super) const SIGPIPE: u8 = 13;
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
    /// Whoever reads our output has gone.
    pub(super) stdout_closed: bool,
}

/// One stream's position.
#[derive(Debug, Default)]
struct Shown {
    next: u64,
    missed: u64,
}

/// A command that is running.
#[derive(Debug)]
pub(super) struct Live {
    client: Client,
    input: Option<Input>,
    signals: SignalFd,
    stream: bool,
    id: u64,
    cancelled: bool,
    interrupted_by: u8,
    stdout_closed: bool,
    shown: [Shown; 2],
}

impl Live {
    /// Prepares signals; `stream` says whether output is shown as it comes.
    pub(super) fn new(mut client: Client, input: Option<Input>, stream: bool) -> Result<Self, ClientError> {
        let failed = |error: nix::Error| ClientError::Local(format!("cannot prepare for signals: {error}"));
        let mut watched = SigSet::empty();
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            watched.add(signal);
        }
        watched.thread_block().map_err(failed)?;
        let signals = SignalFd::with_flags(&watched, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC).map_err(failed)?;
        let id = client.new_id();
        Ok(Self {
            client,
            input,
            signals,
            stream,
            id,
            cancelled: false,
            interrupted_by: 0,
            stdout_closed: false,
            shown: [Shown::default(), Shown::default()],
        })
    }

    /// Runs to the end.
    pub(super) fn run(mut self, mut request: BashExecRequest) -> Result<Outcome, ClientError> {
        crate::ambient::attach(&mut request);
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

    fn outcome(&self, result: BashRunResult) -> Outcome {
        let totals = [
            (StreamName::Stdout, result.stdout.bytes),
            (StreamName::Stderr, result.stderr.bytes),
        ];
        let missed = totals
            .into_iter()
            .zip(&self.shown)
            .filter_map(|((stream, total), shown)| {
                let bytes = shown.missed + total.saturating_sub(shown.next);
                (self.stream && !self.stdout_closed && bytes > 0).then_some(Missed { stream, bytes })
            });
        Outcome {
            missed: missed.collect(),
            interrupted: self.interrupted_by != 0,
            interrupted_by: self.interrupted_by,
            stdout_closed: self.stdout_closed,
            result,
        }
    }

    /// Waits for the daemon, a signal, or standard input.
    fn wait(&mut self) -> Result<(), ClientError> {
        let mut socket = PollFlags::IN;
        if self.client.backlog() > 0 {
            socket |= PollFlags::OUT;
        }
        let wants_input = self.client.backlog() < BACKLOG;
        let mut fds = vec![
            PollFd::new(&self.client, socket),
            PollFd::new(&self.signals, PollFlags::IN),
        ];
        if let Some(input) = self.input.as_ref().filter(|_| wants_input) {
            fds.push(PollFd::new(&input.0, PollFlags::IN));
        }
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
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

    fn forward_input(&mut self) -> Result<(), ClientError> {
        let Some(input) = &self.input else { return Ok(()) };
        let mut chunk = vec![0; INPUT_CHUNK];
        let count = match rustix::io::read(&input.0, &mut chunk[..]) {
            Ok(count) => count,
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => return Ok(()),
            Err(error) => return Err(ClientError::Local(format!("cannot read standard input: {error}"))),
        };
        chunk.truncate(count);
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
            ServerMessage::Finished { result, .. } => return Ok(Some(*result)),
            ServerMessage::Error { error, .. } => return Err(ClientError::Exec(error)),
            _ => {}
        }
        Ok(None)
    }

    fn show(&mut self, stream: StreamName, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        let shown = &mut self.shown[usize::from(stream == StreamName::Stderr)];
        shown.missed += offset.saturating_sub(shown.next);
        shown.next = offset + data.len() as u64;
        let alive = match stream {
            StreamName::Stdout => self.stdout_closed || print(data),
            StreamName::Stderr => {
                // A closed stderr is no reason to stop a command.
                let _ = write_all(rustix::stdio::stderr(), data);
                true
            }
        };
        if !alive {
            self.stdout_closed = true;
            self.cancel()?;
        }
        Ok(())
    }
}

/// Writes to stdout; false when nobody reads it any more.
pub(super) fn print(data: &[u8]) -> bool {
    write_all(rustix::stdio::stdout(), data).is_ok()
}

/// One JSON object on a line of its own.
pub(super) fn print_json<T: serde::Serialize>(value: &T) -> Result<bool, ClientError> {
    let mut line = serde_json::to_vec(value).map_err(|error| ClientError::Local(error.to_string()))?;
    line.push(b'\n');
    Ok(print(&line))
}

fn write_all(fd: impl std::os::fd::AsFd, mut data: &[u8]) -> rustix::io::Result<()> {
    while !data.is_empty() {
        match rustix::io::write(&fd, data) {
            Ok(count) => data = &data[count..],
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => {
                // A terminal or pipe that another program made non-blocking.
                poll(&mut [PollFd::new(&fd, PollFlags::OUT)], None)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
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
