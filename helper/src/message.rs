//! What a sending call means, read once from the caller's memory: bytes, address, flags, and the descriptors that travel with it.
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;

use crate::mediate::Parked;
use crate::reach;

/// Most bytes sent by one call; a stream's caller sends the rest with another, and no datagram is as long.
const DATA_MAX: usize = 1024 * 1024;
/// `UIO_MAXIOV`.
const PARTS_MAX: u64 = 1024;
const CONTROL_MAX: u64 = 4096;
/// `SCM_MAX_FD`.
const DESCRIPTORS_MAX: usize = 253;
const HEADER: usize = size_of::<libc::msghdr>();
const CONTROL_HEADER: usize = size_of::<libc::cmsghdr>();

/// One message to send.
#[derive(Debug)]
pub(crate) struct Message {
    /// Where the name is, and how long; none when the call gives no name.
    pub(crate) address: Option<(u64, u64)>,
    /// What is sent.
    pub(crate) data: Vec<u8>,
    /// Flags of the call.
    pub(crate) flags: i32,
    /// Copies of the caller's descriptors.
    descriptors: Vec<OwnedFd>,
    /// Where `sendmmsg` wants to see how much was sent.
    pub(crate) length_at: Option<u64>,
}

impl Message {
    /// The control messages in the kernel's form, with the numbers that the descriptors have here.
    pub(crate) fn control(&self) -> Vec<u8> {
        if self.descriptors.is_empty() {
            return Vec::new();
        }
        let length = CONTROL_HEADER + 4 * self.descriptors.len();
        let mut control = Vec::with_capacity(length + 8);
        control.extend((length as u64).to_ne_bytes());
        control.extend(libc::SOL_SOCKET.to_ne_bytes());
        control.extend(libc::SCM_RIGHTS.to_ne_bytes());
        for descriptor in &self.descriptors {
            control.extend(descriptor.as_raw_fd().to_ne_bytes());
        }
        control.resize(control.len().next_multiple_of(8), 0);
        control
    }
}

/// Reads the message of `sendto`, `sendmsg`, or the first one of `sendmmsg`; none when that has none.
pub(crate) fn read(parked: &Parked<'_>) -> Result<Option<Message>, Errno> {
    match parked.call.name {
        "sendto" => {
            let mut data = vec![0; usize::try_from(parked.args[2]).unwrap_or(usize::MAX).min(DATA_MAX)];
            if !data.is_empty() {
                parked.view.bytes(parked.args[1], &mut data)?;
            }
            Ok(Some(Message {
                address: (parked.args[4] != 0).then(|| (parked.args[4], u64::from(parked.bits(5)))),
                data,
                flags: parked.int(3),
                descriptors: Vec::new(),
                length_at: None,
            }))
        }
        "sendmmsg" if parked.bits(2) == 0 => Ok(None),
        "sendmmsg" => header(parked, parked.int(3), Some(parked.args[1].wrapping_add(HEADER as u64))).map(Some),
        _ => header(parked, parked.int(2), None).map(Some),
    }
}

/// Reads a `struct msghdr`.
fn header(parked: &Parked<'_>, flags: i32, length_at: Option<u64>) -> Result<Message, Errno> {
    let mut words = [0u8; HEADER];
    parked.view.bytes(parked.args[1], &mut words)?;
    let word = |index: usize| -> u64 {
        words[index * 8..]
            .first_chunk()
            .map_or(0, |bytes| u64::from_ne_bytes(*bytes))
    };
    // name, its length (32 bits), parts, their number, control, its length, flags
    let (name, name_len) = (word(0), word(1) & 0xffff_ffff);
    Ok(Message {
        address: (name != 0 && name_len != 0).then_some((name, name_len)),
        data: gather(parked, word(2), word(3))?,
        flags,
        descriptors: descriptors(parked, word(4), word(5))?,
        length_at,
    })
}

fn gather(parked: &Parked<'_>, at: u64, count: u64) -> Result<Vec<u8>, Errno> {
    if count > PARTS_MAX {
        return Err(Errno::MSGSIZE);
    }
    let mut list = vec![0u8; count as usize * 16];
    if !list.is_empty() {
        parked.view.bytes(at, &mut list)?;
    }
    let mut data = Vec::new();
    for part in list.as_chunks::<16>().0 {
        let (start, length) = part.split_at(8);
        let number = |bytes: &[u8]| bytes.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
        let room = DATA_MAX - data.len();
        let length = usize::try_from(number(length)).unwrap_or(usize::MAX).min(room);
        let from = data.len();
        data.resize(from + length, 0);
        if length > 0 {
            parked.view.bytes(number(start), &mut data[from..])?;
        }
    }
    Ok(data)
}

/// Copies of the descriptors in the control messages. Nothing else can be passed on: credentials would be the helper's.
fn descriptors(parked: &Parked<'_>, at: u64, length: u64) -> Result<Vec<OwnedFd>, Errno> {
    if length > CONTROL_MAX {
        return Err(Errno::NOBUFS);
    }
    let mut control = vec![0u8; if at == 0 { 0 } else { length as usize }];
    if !control.is_empty() {
        parked.view.bytes(at, &mut control)?;
    }
    let mut rest = control.as_slice();
    let mut found = Vec::new();
    while rest.len() >= CONTROL_HEADER {
        let size = rest.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        if size < CONTROL_HEADER || size > rest.len() {
            return Err(Errno::INVAL);
        }
        let int = |bytes: &[u8]| bytes.first_chunk().map_or(0, |bytes| i32::from_ne_bytes(*bytes));
        if (int(&rest[8..]), int(&rest[12..])) != (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            return Err(Errno::OPNOTSUPP);
        }
        for number in rest[CONTROL_HEADER..size].as_chunks::<4>().0 {
            if found.len() == DESCRIPTORS_MAX {
                return Err(Errno::INVAL);
            }
            found.push(reach::take(parked, i32::from_ne_bytes(*number))?);
        }
        rest = rest.get(size.next_multiple_of(8)..).unwrap_or_default();
    }
    Ok(found)
}
