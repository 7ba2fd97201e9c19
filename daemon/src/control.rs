//! How a running request is reached from outside: why it should end, and more standard input.
use std::sync::Arc;

use dsh_policy::ByteString;
use tokio::sync::{Semaphore, mpsc, watch};

use crate::stdin::Piece;

/// Input that may wait for one command, bytes.
const INPUT_ROOM: u32 = 4 * 1024 * 1024;
/// Pieces of input that may wait for one command.
const INPUT_PIECES: usize = 256;

/// Why a request should end although its command has not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The client said so.
    Cancelled,
    /// The client is gone.
    Disconnected,
    /// The daemon leaves.
    ShuttingDown,
}

/// The connection's end.
#[derive(Debug)]
pub(crate) struct Handle {
    stop: watch::Sender<Option<Stop>>,
    input: Option<mpsc::Sender<Piece>>,
    room: Arc<Semaphore>,
}

/// The request's end.
#[derive(Debug)]
pub(crate) struct Control {
    stop: watch::Receiver<Option<Stop>>,
    input: Option<mpsc::Receiver<Piece>>,
}

/// Where one piece of input goes.
#[derive(Clone, Debug)]
pub(crate) struct InputSlot {
    sender: mpsc::Sender<Piece>,
    room: Arc<Semaphore>,
}

pub(crate) fn pair(stdin_open: bool) -> (Handle, Control) {
    let (stop, stopped) = watch::channel(None);
    let (sender, receiver) = if stdin_open {
        let (sender, receiver) = mpsc::channel(INPUT_PIECES);
        (Some(sender), Some(receiver))
    } else {
        (None, None)
    };
    let room = Arc::new(Semaphore::new(INPUT_ROOM as usize));
    (
        Handle {
            stop,
            input: sender,
            room,
        },
        Control {
            stop: stopped,
            input: receiver,
        },
    )
}

impl Handle {
    /// Asks for the end; the first reason stays.
    pub(crate) fn stop(&self, why: Stop) {
        self.stop.send_if_modified(|stop| {
            let first = stop.is_none();
            stop.get_or_insert(why);
            first
        });
    }

    /// Where input goes while it is open.
    pub(crate) fn input(&self) -> Option<InputSlot> {
        Some(InputSlot {
            sender: self.input.clone()?,
            room: Arc::clone(&self.room),
        })
    }

    /// No more input.
    pub(crate) fn close_input(&mut self) {
        self.input = None;
    }
}

impl InputSlot {
    /// Queues a piece, waiting for room. Input that the command does not read any more is dropped.
    pub(crate) async fn send(self, data: ByteString) {
        let wanted = u32::try_from(data.0.len()).unwrap_or(INPUT_ROOM).min(INPUT_ROOM);
        tokio::select! {
            biased;
            () = self.sender.closed() => {}
            Ok(room) = self.room.acquire_many_owned(wanted) => {
                // An error means that the command has stopped reading meanwhile.
                let _ = self.sender.send(Piece { data, _room: room }).await;
            }
        }
    }
}

impl Control {
    /// The pieces of input, when the client keeps it open. Once.
    pub(crate) fn take_input(&mut self) -> Option<mpsc::Receiver<Piece>> {
        self.input.take()
    }

    /// Why to end, as soon as there is a reason. A handle that is dropped is a client that is gone.
    pub(crate) async fn stopped(&mut self) -> Stop {
        match self.stop.wait_for(Option::is_some).await {
            Ok(why) => why.unwrap_or(Stop::Disconnected),
            Err(_) => Stop::Disconnected,
        }
    }
}
