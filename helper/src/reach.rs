//! Connects and sends for the command, on a copy of its socket and to an address that was read and judged once.
//!
//! An address lies in memory and a descriptor in a table, and another thread may change both between a judgement and the kernel's own look. So the call
//! is not let through: the helper takes a copy of the socket (`pidfd_getfd`), looks at that, pins a Unix socket's file and connects to the pinned
//! object. A server sees the helper as its peer (`SO_PEERCRED`): same user and group, another process id.
//!
//! Sends that may carry a name (`sendto` with an address, `sendmsg`, `sendmmsg`) are let through as long as the command has made no socket that heeds it: a
//! connected stream never does. From its first datagram socket of the Unix family on, and with a network setting of `loopback`, the helper sends too.
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use dsh_policy::decide::{Verdict, unix_connect};
use dsh_policy::denial::{Operation, Rule};
use dsh_policy::mode::Network;
use rustix::fs::{Access, FileType, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, sockopt};

use crate::address::{self, unix_path};
use crate::facts::Refusal;
use crate::mediate::{Decision, Judge, Parked, refusal};
use crate::message::{self, Message};
use crate::object::{self, Last};
use crate::sys::{self, Answer};
use crate::{natural, tree, unix_names};

/// `sizeof(struct sockaddr_storage)`: the kernel takes no longer address.
const ADDRESS_MAX: u64 = 128;
/// Calls that may wait at the same time, each in a thread of its own. More get the error of a full queue.
const WAITING_MAX: usize = 64;

/// How long the first datagram socket waits for sends that were let through before it.
const SENDING_MAX: Duration = Duration::from_millis(200);
/// What a thread runs at most until the kernel has looked at the arguments of its call, nanoseconds; it is a few thousand.
const LOOK_MAX_NS: u64 = 1_000_000;
/// Threads remembered before those that are gone are forgotten.
const SENDING_KEPT: usize = 1024;

/// A thread is kept from going on with a send.
#[derive(Debug)]
pub(crate) struct StillSending;

/// What is known about the command's sockets.
#[derive(Debug)]
pub(crate) struct Sockets {
    /// Sockets can be taken over here; otherwise addresses are judged by name and the call let through.
    pins: bool,
    /// The command has made a socket of the Unix family whose sends may name another.
    datagrams: Cell<bool>,
    /// Threads that were let through with a send and have not been heard of since: they may not have looked at their socket yet.
    sending: RefCell<HashSet<i32>>,
    waiting: Arc<AtomicUsize>,
}

impl Sockets {
    /// Of a command that has not started.
    pub(crate) fn new() -> Self {
        Self {
            pins: sys::can_take_descriptors(),
            datagrams: Cell::new(false),
            sending: RefCell::default(),
            waiting: Arc::default(),
        }
    }

    /// Whether the helper connects and sends by itself.
    pub(crate) fn pins(&self) -> bool {
        self.pins
    }

    /// The command is about to make a socket, or a pair, of this family and kind. An error when it must not: a send that was let through before might
    /// still find the new socket in the place of its own.
    pub(crate) fn make(&self, family: i32, kind: i32) -> Result<(), StillSending> {
        // The kernel makes a datagram socket of a raw one here.
        let datagram = matches!(kind & 0xf, libc::SOCK_DGRAM | libc::SOCK_RAW);
        if self.pins && family == libc::AF_UNIX && datagram && !self.datagrams.get() {
            let sending = self.sending.take();
            let deadline = Instant::now() + SENDING_MAX;
            if !sending.into_iter().all(|thread| has_sent(thread, deadline)) {
                return Err(StillSending);
            }
            self.datagrams.set(true);
        }
        Ok(())
    }

    /// A thread asks something, so that its last send is over.
    pub(crate) fn heard_of(&self, thread: i32) {
        self.sending.borrow_mut().remove(&thread);
    }

    fn let_through(&self, thread: i32) -> Decision {
        let mut sending = self.sending.borrow_mut();
        if sending.len() >= SENDING_KEPT {
            sending.retain(|thread| tree::parent(*thread).is_some());
        }
        sending.insert(thread);
        Decision::CONTINUE
    }
}

/// Where a call goes to.
enum Destination {
    /// These bytes.
    Address(Vec<u8>),
    /// A pinned socket file.
    Pinned(OwnedFd),
}

impl Destination {
    /// In the kernel's form; valid as long as `self`.
    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Address(bytes) => bytes.clone(),
            Self::Pinned(object) => {
                let mut bytes = (libc::AF_UNIX as u16).to_ne_bytes().to_vec();
                bytes.extend(object::own_path(object.as_fd()).into_bytes());
                bytes.push(0);
                bytes
            }
        }
    }
}

/// A destination, or the decision that there is none.
type Judged = Result<Destination, Decision>;

/// Judges, and carries out, one call that names an address, except `bind`.
pub(crate) fn judge(judge: &Judge, parked: &Parked<'_>) -> Decision {
    let heeds_names = judge.sockets.datagrams.get() || judge.confinement.network == Network::Loopback;
    let outcome = match parked.call.name {
        "connect" => connect(judge, parked),
        _ if !heeds_names => return judge.sockets.let_through(parked.view.thread),
        _ => send(judge, parked),
    };
    outcome.unwrap_or_else(|errno| match errno {
        // A process that hides its memory or its descriptors: nobody can say where it goes.
        Errno::PERM => Decision::Refuse(Refusal::of(
            Operation::ConnectUnix,
            Rule::UnixSocket,
            Some("address unknown".to_owned()),
        )),
        errno => Decision::fail(errno),
    })
}

fn connect(judge: &Judge, parked: &Parked<'_>) -> Result<Decision, Errno> {
    let socket = take(parked, parked.int(0))?;
    let address = read_address(parked, parked.args[1], u64::from(parked.bits(2)))?;
    let destination = match destination(judge, parked, &socket, address)? {
        Ok(destination) => destination,
        Err(decision) => return Ok(decision),
    };
    if !parked.listener.is_waiting(parked.id) {
        return Err(Errno::INTR);
    }
    let waits = !is_nonblocking(&socket)? && sockopt::socket_type(&socket)? != SocketType::DGRAM;
    let call = move || result(sys::connect(socket.as_fd(), &destination.bytes()).map(|()| 0));
    if waits {
        return later(judge, parked, call);
    }
    Ok(Decision::Answer(call()))
}

fn send(judge: &Judge, parked: &Parked<'_>) -> Result<Decision, Errno> {
    let socket = take(parked, parked.int(0))?;
    let Some(message) = message::read(parked)? else {
        return Ok(Decision::Answer(Answer::Value(0))); // `sendmmsg` of nothing.
    };
    let destination = match &message.address {
        None => None,
        Some((at, length)) => {
            let address = read_address(parked, *at, *length)?;
            match destination(judge, parked, &socket, address)? {
                Ok(destination) => Some(destination),
                Err(decision) => return Ok(decision),
            }
        }
    };
    if !parked.listener.is_waiting(parked.id) {
        return Err(Errno::INTR);
    }
    let waits = !is_nonblocking(&socket)? && message.flags & libc::MSG_DONTWAIT == 0;
    let thread = parked.view.thread;
    let first = transmit(&socket, destination.as_ref(), &message, 0, libc::MSG_DONTWAIT);
    let done = match &first {
        Ok(sent) => *sent,
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => 0,
        Err(_) => message.data.len(),
    };
    let blocked = matches!(&first, Err(error) if error.raw_os_error() == Some(libc::EAGAIN));
    if waits && (blocked || done < message.data.len()) {
        return later(judge, parked, move || {
            let rest = transmit(&socket, destination.as_ref(), &message, done, 0);
            settle(
                thread,
                &message,
                if done > 0 {
                    rest.map(|sent| done + sent).or(Ok(done))
                } else {
                    rest
                },
            )
        });
    }
    Ok(Decision::Answer(settle(thread, &message, first)))
}

fn transmit(
    socket: &OwnedFd,
    destination: Option<&Destination>,
    message: &Message,
    from: usize,
    flags: i32,
) -> std::io::Result<usize> {
    let address = destination.map(Destination::bytes);
    // What travels beside the bytes travels with the first of them.
    let control = if from == 0 { message.control() } else { Vec::new() };
    sys::send(
        socket.as_fd(),
        address.as_deref(),
        &message.data[from..],
        &control,
        message.flags | flags,
    )
}

/// What the caller gets and sees of a send.
fn settle(thread: i32, message: &Message, sent: std::io::Result<usize>) -> Answer {
    match sent {
        Ok(sent) => match message.length_at {
            None => Answer::Value(sent as i64),
            // One message of a `sendmmsg`; callers send the rest with another call.
            Some(at) => match sys::write_memory(thread, at, &(sent as u32).to_ne_bytes()) {
                Ok(()) => Answer::Value(1),
                Err(_) => Answer::Fail(libc::EFAULT),
            },
        },
        Err(error) => {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            if errno == libc::EPIPE && message.flags & libc::MSG_NOSIGNAL == 0 {
                let _ = sys::kill(thread, libc::SIGPIPE);
            }
            Answer::Fail(errno)
        }
    }
}

/// Waits until the kernel must have looked at what the thread sends: it sleeps in the call, has left it, or has run for longer than the look takes.
fn has_sent(thread: i32, deadline: Instant) -> bool {
    let before = run_time(thread);
    loop {
        let ran = run_time(thread)
            .zip(before)
            .is_some_and(|(now, before)| now > before + LOOK_MAX_NS);
        if ran || !is_on_its_way(thread) {
            return true;
        }
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Whether the thread wants a processor, or waits for its memory.
fn is_on_its_way(thread: i32) -> bool {
    let stat = tree::read_start(&tree::proc_path(thread, "stat"), 512);
    let name_end = stat.iter().rposition(|byte| *byte == b')');
    name_end.is_some_and(|end| matches!(stat.get(end + 2), Some(b'R' | b'D')))
}

/// How long a thread has run, nanoseconds.
fn run_time(thread: i32) -> Option<u64> {
    let text = tree::read_start(&tree::proc_path(thread, "schedstat"), 128);
    let first = text.split(|byte| *byte == b' ').next()?;
    std::str::from_utf8(first).ok()?.parse().ok()
}

/// A copy of one of the caller's descriptors.
pub(crate) fn take(parked: &Parked<'_>, fd: i32) -> Result<OwnedFd, Errno> {
    let thread = parked.view.thread;
    let process = tree::thread_group(thread).ok_or(Errno::SRCH)?;
    sys::take_descriptor(thread, process, fd).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::BADF))
}

fn is_nonblocking(socket: &OwnedFd) -> Result<bool, Errno> {
    Ok(rustix::fs::fcntl_getfl(socket)?.contains(OFlags::NONBLOCK))
}

fn read_address(parked: &Parked<'_>, at: u64, length: u64) -> Result<Vec<u8>, Errno> {
    if length > ADDRESS_MAX {
        return Err(Errno::INVAL);
    }
    let mut address = vec![0; length as usize];
    if !address.is_empty() {
        parked.view.bytes(at, &mut address)?;
    }
    Ok(address)
}

/// Judges an address for this socket. The copy of the socket is what will be used, so its family cannot become another.
fn destination(judge: &Judge, parked: &Parked<'_>, socket: &OwnedFd, address: Vec<u8>) -> Result<Judged, Errno> {
    let socket_family = sockopt::socket_domain(socket)?;
    let family = address.first_chunk().map(|bytes| i32::from(u16::from_ne_bytes(*bytes)));
    Ok(match (socket_family, family) {
        (AddressFamily::UNIX, Some(libc::AF_UNIX)) => match unix_path(&address) {
            Some(_) => return named(judge, parked, &address),
            None if address.len() > address::PATH_OFFSET => abstract_name(parked, socket, address)?,
            None => Ok(Destination::Address(address)),
        },
        (AddressFamily::INET | AddressFamily::INET6, Some(libc::AF_INET | libc::AF_INET6)) => {
            match address::reach_network(judge, &address) {
                Decision::Answer(Answer::Continue) => Ok(Destination::Address(address)),
                decision => Err(decision),
            }
        }
        // `AF_UNSPEC` dissolves an association, and all else is for the kernel to say: it cannot lead to a file or, where that matters, a network.
        _ => Ok(Destination::Address(address)),
    })
}

/// A socket with a path: pinned, judged by its canonical name.
fn named(judge: &Judge, parked: &Parked<'_>, address: &[u8]) -> Result<Judged, Errno> {
    if address.len() > size_of::<libc::sockaddr_un>() {
        return Err(Errno::INVAL);
    }
    let given = unix_path(address).ok_or(Errno::INVAL)?;
    let mut found = parked.view.resolve(libc::AT_FDCWD, given, Last::Follow)?;
    let object = found.object.as_ref().ok_or(Errno::NOENT)?;
    if object::kind(object)? != FileType::Socket {
        return Err(Errno::CONNREFUSED);
    }
    Ok(match unix_connect(&judge.confinement, &found.path) {
        Verdict::Allow => found
            .object
            .take()
            .map(Destination::Pinned)
            .ok_or(Decision::fail(Errno::NOENT)),
        Verdict::Refuse(rule) => match natural::access(object, Access::WRITE_OK) {
            Some(errno) => return Err(errno),
            None => Err(refusal(Operation::ConnectUnix, rule, found, given.to_vec())),
        },
    })
}

/// An abstract name: the command's own when it belongs to one of its processes. Landlock judges the same by its scope, but it is the helper that connects.
fn abstract_name(parked: &Parked<'_>, socket: &OwnedFd, address: Vec<u8>) -> Result<Judged, Errno> {
    let name = &address[address::PATH_OFFSET..];
    let listening = sockopt::socket_type(socket)? != SocketType::DGRAM;
    Ok(match unix_names::owner(parked.view.thread, name, listening) {
        unix_names::Owner::Nobody => Err(Decision::fail(Errno::CONNREFUSED)),
        unix_names::Owner::Command => Ok(Destination::Address(address)),
        unix_names::Owner::Other => Err(Decision::Refuse(Refusal::of(
            Operation::ConnectUnix,
            Rule::UnixSocket,
            Some(unix_names::printable(name)),
        ))),
    })
}

/// Does `call` in a thread of its own, which answers when it is done: the supervisor must not wait for one caller.
fn later(
    judge: &Judge,
    parked: &Parked<'_>,
    call: impl FnOnce() -> Answer + Send + 'static,
) -> Result<Decision, Errno> {
    let listener = parked.listener.share().map_err(|_| Errno::AGAIN)?;
    let waiting = Arc::clone(&judge.sockets.waiting);
    if waiting.fetch_add(1, Ordering::Relaxed) >= WAITING_MAX {
        waiting.fetch_sub(1, Ordering::Relaxed);
        return Err(Errno::AGAIN);
    }
    let id = parked.id;
    let counted = Arc::clone(&waiting);
    let started = std::thread::Builder::new().stack_size(64 * 1024).spawn(move || {
        listener.answer(id, call());
        counted.fetch_sub(1, Ordering::Relaxed);
    });
    match started {
        Ok(_) => Ok(Decision::Answer(Answer::Later)),
        Err(_) => {
            waiting.fetch_sub(1, Ordering::Relaxed);
            Err(Errno::AGAIN)
        }
    }
}

fn result(outcome: std::io::Result<i64>) -> Answer {
    match outcome {
        Ok(value) => Answer::Value(value),
        Err(error) => Answer::Fail(error.raw_os_error().unwrap_or(libc::EIO)),
    }
}
