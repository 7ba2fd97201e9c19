//! How a running request is reached from outside: why it should end, and more standard input.
use dsh_policy::request::TerminalSize;
use dsh_policy::wire::INPUT_WINDOW;
use tokio::io::DuplexStream;
use tokio::sync::watch;

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
    size: watch::Sender<Option<TerminalSize>>,
    input: Option<DuplexStream>,
}

/// The request's end.
#[derive(Debug)]
pub(crate) struct Control {
    stop: watch::Receiver<Option<Stop>>,
    size: watch::Receiver<Option<TerminalSize>>,
    input: Option<DuplexStream>,
}

/// The two ends of a request; between them room for all the input that a client may have on its way.
pub(crate) fn pair(stdin_open: bool) -> (Handle, Control) {
    let (stop, stopped) = watch::channel(None);
    let (size, sizes) = watch::channel(None);
    let (ours, theirs) = stdin_open.then(|| tokio::io::duplex(INPUT_WINDOW as usize)).unzip();
    (
        Handle {
            stop,
            size,
            input: ours,
        },
        Control {
            stop: stopped,
            size: sizes,
            input: theirs,
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

    /// Gives the request's terminal another size; the last one counts.
    pub(crate) fn resize(&self, size: TerminalSize) {
        self.size.send_replace(Some(size));
    }

    /// Where input goes, while it is open; given back with [`Handle::keep_input`], ended by dropping it.
    pub(crate) fn take_input(&mut self) -> Option<DuplexStream> {
        self.input.take()
    }

    /// More input will come.
    pub(crate) fn keep_input(&mut self, input: DuplexStream) {
        self.input = Some(input);
    }
}

impl Control {
    /// Where input comes from, when the client keeps it open. Once.
    pub(crate) fn take_input(&mut self) -> Option<DuplexStream> {
        self.input.take()
    }

    /// Sizes for the terminal, as they come.
    pub(crate) fn sizes(&self) -> watch::Receiver<Option<TerminalSize>> {
        self.size.clone()
    }

    /// Why to end, as soon as there is a reason. A handle that is dropped is a client that is gone.
    pub(crate) async fn stopped(&mut self) -> Stop {
        match self.stop.wait_for(Option::is_some).await {
            Ok(why) => why.unwrap_or(Stop::Disconnected),
            Err(_) => Stop::Disconnected,
        }
    }
}
