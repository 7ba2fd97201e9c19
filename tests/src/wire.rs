//! A client written by hand, for saying things to the daemon that the real one never says.
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use dsh_policy::frame::{self, Decoder, FRAME_LIMIT};
use dsh_policy::plan::BUILD_ID;
use dsh_policy::wire::{ClientMessage, Encoding, Hello, HelloReply, PROTOCOL, ProtocolVersion, ServerMessage};
use dsh_policy::{BashExecRequest, ByteString};

/// A connection before or after its hello.
pub struct Peer {
    /// The socket.
    pub stream: UnixStream,
    decoder: Decoder,
    encoding: Encoding,
}

impl Peer {
    /// Connects and says nothing yet.
    #[must_use]
    pub fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).expect("the daemon listens");
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
        Self {
            stream,
            decoder: Decoder::new(FRAME_LIMIT),
            encoding: Encoding::Json,
        }
    }

    /// Connects and completes the hello.
    #[must_use]
    pub fn hello(socket: &Path, encoding: Encoding) -> Self {
        let mut peer = Self::connect(socket);
        let reply = peer.greet(PROTOCOL, encoding).expect("an answer to the hello");
        assert_eq!(reply.error, None);
        peer
    }

    /// Sends a hello of any version; gives the answer, none when the daemon closed.
    pub fn greet(&mut self, protocol: ProtocolVersion, encoding: Encoding) -> Option<HelloReply> {
        self.greet_as(protocol, encoding, BUILD_ID)
    }

    /// The same for a client of any build.
    pub fn greet_as(&mut self, protocol: ProtocolVersion, encoding: Encoding, build: &str) -> Option<HelloReply> {
        let hello = Hello {
            protocol,
            encoding,
            client: "dsh-tests".into(),
            build: build.into(),
        };
        self.raw(&frame::encode(&serde_json::to_vec(&hello).unwrap()).unwrap());
        let reply = self.payload()?;
        let reply: HelloReply = serde_json::from_slice(&reply).expect("the answer to a hello is JSON");
        self.encoding = reply.encoding;
        Some(reply)
    }

    /// Sends bytes as they are; a daemon that has closed is fine.
    pub fn raw(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    /// Sends a message.
    pub fn send(&mut self, message: &ClientMessage) {
        let bytes = self.encoding.frame(message).unwrap();
        self.raw(&bytes);
    }

    /// Sends a request to run something read-only.
    pub fn run(&mut self, id: u64, command: &str) {
        let request = BashExecRequest {
            command: command.into(),
            ..Default::default()
        };
        self.send(&ClientMessage::Run {
            id,
            request: Box::new(request),
            stream: false,
        });
    }

    /// The next payload; none at end of file or after a reset.
    pub fn payload(&mut self) -> Option<Vec<u8>> {
        let mut buffer = vec![0; 64 * 1024];
        loop {
            if let Some(payload) = self
                .decoder
                .next_payload()
                .expect("frames of the daemon are within bounds")
            {
                return Some(payload);
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => return None,
                Ok(count) => self.decoder.push(&buffer[..count]),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("reading from the daemon: {error}"),
            }
        }
    }

    /// The next message.
    pub fn message(&mut self) -> Option<ServerMessage> {
        let payload = self.payload()?;
        Some(self.encoding.server_message(&payload).expect("a message of the daemon"))
    }

    /// Reads until the last answer of request `id`.
    pub fn last_answer(&mut self, id: u64) -> ServerMessage {
        loop {
            match self
                .message()
                .unwrap_or_else(|| panic!("the daemon closed before it answered request {id}"))
            {
                answer @ ServerMessage::Finished { .. } if matches!(answer, ServerMessage::Finished { id: n, .. } if n == id) =>
                {
                    return answer;
                }
                answer @ ServerMessage::Error { .. } if matches!(answer, ServerMessage::Error { id: Some(n), .. } if n == id) =>
                {
                    return answer;
                }
                _ => {}
            }
        }
    }

    /// Runs a command and gives its standard output.
    pub fn output_of(&mut self, id: u64, command: &str) -> String {
        self.run(id, command);
        match self.last_answer(id) {
            ServerMessage::Finished { result, .. } => result.stdout.text,
            other => panic!("request {id}: {other:?}"),
        }
    }

    /// Whether the daemon has closed this connection, within the read timeout.
    pub fn is_closed_by_daemon(&mut self) -> bool {
        while self.payload().is_some() {}
        true
    }
}

/// The smallest request.
#[must_use]
pub fn request(command: &str) -> BashExecRequest {
    BashExecRequest {
        command: ByteString::from(command),
        ..Default::default()
    }
}
