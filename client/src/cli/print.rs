//! Writing to the standard streams of this process.
use rustix::event::{PollFd, PollFlags, poll};

use crate::error::ClientError;

/// Writes to stdout whatever it takes.
///
/// # Errors
/// [`ClientError::OutputClosed`] when nobody reads it any more, [`ClientError::Local`] when it cannot take it.
pub(super) fn print(data: &[u8]) -> Result<(), ClientError> {
    write_all(rustix::stdio::stdout(), data).map_err(failed)
}

/// One JSON object on a line of its own.
pub(super) fn print_json<T: serde::Serialize>(value: &T) -> Result<(), ClientError> {
    let mut line = serde_json::to_vec(value).map_err(|error| ClientError::Local(error.to_string()))?;
    line.push(b'\n');
    print(&line)
}

/// What an error of a write to stdout means.
pub(super) fn failed(error: rustix::io::Errno) -> ClientError {
    if error == rustix::io::Errno::PIPE {
        ClientError::OutputClosed
    } else {
        ClientError::Local(format!("cannot write to standard output: {error}"))
    }
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
