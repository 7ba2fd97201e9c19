//! Doors that are sockets: of the Unix family by path and abstract name, and of the network. A network address is a port on 127.0.0.1.
use std::ffi::CString;

use super::{Answer, Door, at, number, sockaddr, sys};

/// A socket address and its length.
type Name = ([u8; 128], usize);

fn socket(family: i32, kind: i32, protocol: i32) -> Answer {
    sys(libc::SYS_socket, &[family as usize, kind as usize, protocol as usize])
}
fn named(argument: &CString) -> Name {
    let (address, length) = sockaddr(argument);
    let mut name = [0; 128];
    name[..2].copy_from_slice(&address.sun_family.to_ne_bytes());
    for (slot, byte) in name[2..].iter_mut().zip(address.sun_path) {
        *slot = byte as u8;
    }
    (name, length)
}
fn abstract_name(argument: &CString) -> Name {
    let mut name = [0; 128];
    name[..2].copy_from_slice(&(libc::AF_UNIX as u16).to_ne_bytes());
    name[3..3 + argument.as_bytes().len()].copy_from_slice(argument.as_bytes());
    (name, 3 + argument.as_bytes().len())
}
fn ipv4(port: &CString) -> Name {
    let mut name = [0; 128];
    name[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
    name[2..4].copy_from_slice(&(number(port) as u16).to_be_bytes());
    name[4..8].copy_from_slice(&[127, 0, 0, 1]);
    (name, 16)
}
fn ipv6_mapped(port: &CString) -> Name {
    let mut name = [0; 128];
    name[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
    name[2..4].copy_from_slice(&(number(port) as u16).to_be_bytes());
    name[18..24].copy_from_slice(&[255, 255, 127, 0, 0, 1]);
    (name, 28)
}
fn connect(socket: usize, (name, length): &Name) -> Answer {
    sys(libc::SYS_connect, &[socket, at(name), *length])
}
fn sendto(socket: usize, (name, length): &Name, flags: i32) -> Answer {
    sys(
        libc::SYS_sendto,
        &[socket, at(b"mark"), 4, flags as usize, at(name), *length],
    )
}
/// `struct msghdr` and room for the length that `sendmmsg` writes.
fn message(name: &Name, part: &[usize; 2]) -> [usize; 8] {
    [at(&name.0), name.1, at(part), 1, 0, 0, 0, 0]
}
fn sendmsg(socket: usize, name: &Name, flags: i32) -> Answer {
    let part = [at(b"mark"), 4];
    sys(libc::SYS_sendmsg, &[socket, at(&message(name, &part)), flags as usize])
}
fn sendmmsg(socket: usize, name: &Name) -> Answer {
    let part = [at(b"mark"), 4];
    let messages = std::cell::Cell::new(message(name, &part)); // the kernel writes to it
    sys(libc::SYS_sendmmsg, &[socket, at(&messages), 1, 0])
}
fn unix(kind: i32) -> Answer {
    socket(libc::AF_UNIX, kind, 0)
}
fn inet(kind: i32, protocol: i32) -> Answer {
    socket(libc::AF_INET, kind, protocol)
}

use libc::{SOCK_DGRAM as DGRAM, SOCK_RAW as RAW, SOCK_SEQPACKET as SEQPACKET, SOCK_STREAM as STREAM};

/// The Unix family.
pub(super) const UNIX: &[Door] = &[
    ("connect-unix", 1, |a| connect(unix(STREAM)?, &named(&a[0]))),
    ("connect-unix-seqpacket", 1, |a| {
        connect(unix(SEQPACKET)?, &named(&a[0]))
    }),
    ("connect-unix-datagram", 1, |a| connect(unix(DGRAM)?, &named(&a[0]))),
    ("sendto-unix", 1, |a| sendto(unix(DGRAM)?, &named(&a[0]), 0)),
    ("sendmsg-unix", 1, |a| sendmsg(unix(DGRAM)?, &named(&a[0]), 0)),
    ("sendmsg-unix-raw", 1, |a| sendmsg(unix(RAW)?, &named(&a[0]), 0)),
    ("sendmmsg-unix", 1, |a| sendmmsg(unix(DGRAM)?, &named(&a[0]))),
    ("sendmsg-unix-pair", 1, |a| {
        let pair = std::cell::Cell::new([0i32; 2]); // the kernel writes to it
        sys(
            libc::SYS_socketpair,
            &[libc::AF_UNIX as usize, DGRAM as usize, 0, at(&pair)],
        )?;
        sendmsg(pair.get()[0] as usize, &named(&a[0]), 0)
    }),
    ("connect-abstract", 1, |a| connect(unix(STREAM)?, &abstract_name(&a[0]))),
    ("sendto-abstract", 1, |a| sendto(unix(DGRAM)?, &abstract_name(&a[0]), 0)),
    ("sendmsg-abstract", 1, |a| {
        sendmsg(unix(DGRAM)?, &abstract_name(&a[0]), 0)
    }),
    ("unix-pair", 0, |_| {
        let pair = std::cell::Cell::new([0i32; 2]); // the kernel writes to it
        sys(
            libc::SYS_socketpair,
            &[libc::AF_UNIX as usize, STREAM as usize, 0, at(&pair)],
        )?;
        sys(libc::SYS_write, &[pair.get()[0] as usize, at(b"x"), 1])
    }),
];

/// The network.
pub(super) const NETWORK: &[Door] = &[
    ("tcp-connect", 1, |a| connect(inet(STREAM, 0)?, &ipv4(&a[0]))),
    ("tcp-connect-mapped", 1, |a| {
        connect(socket(libc::AF_INET6, STREAM, 0)?, &ipv6_mapped(&a[0]))
    }),
    ("tcp-fastopen", 1, |a| {
        sendto(inet(STREAM, 0)?, &ipv4(&a[0]), libc::MSG_FASTOPEN)
    }),
    ("tcp-fastopen-msg", 1, |a| {
        sendmsg(inet(STREAM, 0)?, &ipv4(&a[0]), libc::MSG_FASTOPEN)
    }),
    ("mptcp-connect", 1, |a| connect(inet(STREAM, 262)?, &ipv4(&a[0]))),
    ("sctp-socket", 0, |_| inet(STREAM, 132)),
    ("udp-connect", 1, |a| connect(inet(DGRAM, 0)?, &ipv4(&a[0]))),
    ("udp-send", 1, |a| sendto(inet(DGRAM, 0)?, &ipv4(&a[0]), 0)),
    ("udp-sendmsg", 1, |a| sendmsg(inet(DGRAM, 0)?, &ipv4(&a[0]), 0)),
    ("udp-sendmmsg", 1, |a| sendmmsg(inet(DGRAM, 0)?, &ipv4(&a[0]))),
    ("udplite-socket", 0, |_| inet(DGRAM, 136)),
    ("ping-socket", 0, |_| inet(DGRAM, 1)),
    ("raw-socket", 0, |_| inet(RAW, 1)),
    ("packet-socket", 0, |_| socket(libc::AF_PACKET, RAW, 0)),
    ("netlink-route", 0, |_| socket(libc::AF_NETLINK, RAW, 0)),
    ("netlink-uevent", 0, |_| socket(libc::AF_NETLINK, RAW, 15)),
    ("netlink-generic", 0, |_| socket(libc::AF_NETLINK, RAW, 16)),
    ("vsock-socket", 0, |_| socket(libc::AF_VSOCK, STREAM, 0)),
    ("alg-socket", 0, |_| socket(libc::AF_ALG, SEQPACKET, 0)),
    ("bluetooth-socket", 0, |_| socket(libc::AF_BLUETOOTH, RAW, 1)),
    ("tcp-bind", 1, |a| {
        let (name, length) = ipv4(&a[0]);
        sys(libc::SYS_bind, &[inet(STREAM, 0)?, at(&name), length])
    }),
    ("tcp-serve", 0, |_| {
        let none = CString::default();
        let server = inet(STREAM, 0)?;
        let (name, length) = ipv4(&none);
        sys(libc::SYS_bind, &[server, at(&name), length])?;
        sys(libc::SYS_listen, &[server, 1])?;
        let (own, size) = (std::cell::Cell::new([0u8; 128]), std::cell::Cell::new(128u32)); // the kernel writes to both
        sys(libc::SYS_getsockname, &[server, at(&own), at(&size)])?;
        connect(inet(STREAM, 0)?, &(own.get(), 16))?;
        sys(libc::SYS_accept4, &[server, 0, 0, 0])
    }),
    ("tcp-listen", 0, |_| sys(libc::SYS_listen, &[inet(STREAM, 0)?, 1])),
];
