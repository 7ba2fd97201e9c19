//! Judges socket addresses: Unix sockets of the host by path, and destinations when the network is restricted.
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use dsh_policy::decide::{Verdict, unix_connect};
use dsh_policy::denial::{Operation, Rule};
use dsh_policy::mode::Network;
use rustix::fs::{Access, FileType};
use rustix::io::Errno;

use crate::facts::Refusal;
use crate::mediate::{Decision, Judge, Parked, refusal};
use crate::natural;
use crate::object::{self, Last};
use crate::reach;

/// Size of the largest address that is looked at, `sockaddr_un` with a byte to end its path.
const ADDRESS_MAX: usize = 110;
pub(crate) const PATH_OFFSET: usize = 2;

/// Judges one call that names an address.
pub(crate) fn judge(judge: &Judge, parked: &Parked<'_>) -> Decision {
    if parked.call.name != "bind" && judge.sockets.pins() {
        return reach::judge(judge, parked);
    }
    judge_address(judge, parked).unwrap_or_else(Decision::fail)
}

/// An error is the call's answer: with other words in memory a moment later it could have meant another socket.
fn judge_address(judge: &Judge, parked: &Parked<'_>) -> Result<Decision, Errno> {
    let (address, length) = match parked.call.name {
        "sendto" => (parked.args[4], parked.args[5]),
        _ => (parked.args[1], parked.args[2]),
    };
    let length = length as u32 as usize;
    let mut bytes = [0u8; ADDRESS_MAX];
    let length = length.min(ADDRESS_MAX - 1);
    if length < PATH_OFFSET {
        return Ok(Decision::CONTINUE);
    }
    match parked.view.bytes(address, &mut bytes[..length]) {
        Err(Errno::PERM) => return Ok(blind(judge, parked)),
        other => other?,
    }
    let family = i32::from(u16::from_ne_bytes([bytes[0], bytes[1]]));
    match (family, parked.call.name) {
        (libc::AF_UNIX, "bind") => bind_unix(judge, parked, &bytes[..length]),
        (libc::AF_UNIX, _) => reach_unix(judge, parked, &bytes[..length]),
        (libc::AF_INET | libc::AF_INET6, "bind") => Ok(Decision::CONTINUE),
        (libc::AF_INET | libc::AF_INET6, _) => Ok(reach_network(judge, &bytes[..length])),
        _ => Ok(Decision::CONTINUE),
    }
}

/// A process that hides its memory: nobody can say where it goes.
fn blind(judge: &Judge, parked: &Parked<'_>) -> Decision {
    if parked.call.name == "bind" {
        return Decision::CONTINUE;
    }
    let _ = judge;
    Decision::Refuse(Refusal::of(
        Operation::ConnectUnix,
        Rule::UnixSocket,
        Some("address unknown".to_owned()),
    ))
}

/// The path in a Unix address; none for an unnamed or abstract one.
pub(crate) fn unix_path(address: &[u8]) -> Option<&[u8]> {
    let path = &address[PATH_OFFSET..];
    let end = path.iter().position(|byte| *byte == 0).unwrap_or(path.len());
    (end > 0).then(|| &path[..end])
}

fn reach_unix(judge: &Judge, parked: &Parked<'_>, address: &[u8]) -> Result<Decision, Errno> {
    // Landlock's scope decides about abstract names.
    let Some(given) = unix_path(address) else {
        return Ok(Decision::CONTINUE);
    };
    let found = parked.view.resolve(libc::AT_FDCWD, given, Last::Follow)?;
    let object = found.object.as_ref().ok_or(Errno::NOENT)?;
    if object::kind(object)? != FileType::Socket {
        return Err(Errno::CONNREFUSED);
    }
    match unix_connect(&judge.confinement, &found.path) {
        Verdict::Allow => Ok(Decision::CONTINUE),
        Verdict::Refuse(rule) => match natural::access(object, Access::WRITE_OK) {
            Some(errno) => Err(errno),
            None => Ok(refusal(Operation::ConnectUnix, rule, found, given.to_vec())),
        },
    }
}

/// A socket file is made: a name like any other, which Landlock enforces.
fn bind_unix(judge: &Judge, parked: &Parked<'_>, address: &[u8]) -> Result<Decision, Errno> {
    let Some(given) = unix_path(address) else {
        return Ok(Decision::CONTINUE);
    };
    let Ok(found) = parked.view.resolve(libc::AT_FDCWD, given, Last::Name) else {
        return Ok(Decision::CONTINUE);
    };
    match judge.refuses(Operation::MakeNode, &found.path) {
        Some(rule) if natural::create(&found, false).is_none() => {
            Ok(refusal(Operation::MakeNode, rule, found, given.to_vec()))
        }
        _ => Ok(Decision::CONTINUE),
    }
}

pub(crate) fn reach_network(judge: &Judge, address: &[u8]) -> Decision {
    let rule = match judge.confinement.network {
        Network::Full => return Decision::CONTINUE,
        Network::Loopback => Rule::NetworkLoopback,
        Network::None => Rule::NetworkNone,
    };
    let Some(destination) = internet(address) else {
        return Decision::fail(Errno::INVAL);
    };
    let local = match destination.ip() {
        IpAddr::V4(ip) => ip.is_loopback() || ip.is_unspecified(),
        IpAddr::V6(ip) => {
            ip.is_loopback() || ip.is_unspecified() || ip.to_ipv4_mapped().is_some_and(|ip| ip.is_loopback())
        }
    };
    if local && judge.confinement.network == Network::Loopback {
        return Decision::CONTINUE;
    }
    Decision::Refuse(Refusal::of(Operation::Connect, rule, Some(destination.to_string())))
}

fn internet(address: &[u8]) -> Option<SocketAddr> {
    let family = i32::from(u16::from_ne_bytes(*address.first_chunk()?));
    let port = u16::from_be_bytes(*address.get(2..)?.first_chunk()?);
    let ip = if family == libc::AF_INET {
        IpAddr::V4(Ipv4Addr::from(*address.get(4..)?.first_chunk::<4>()?))
    } else {
        IpAddr::V6(Ipv6Addr::from(*address.get(8..)?.first_chunk::<16>()?))
    };
    Some(SocketAddr::new(ip, port))
}

/// `AF_INET SOCK_STREAM`, with the protocol when it is not the usual one.
pub(crate) fn describe_socket(family: i32, kind: i32, protocol: i32) -> String {
    let name = |number: i32, names: &[(i32, &str)], prefix: &str| {
        names
            .iter()
            .find(|(known, _)| *known == number)
            .map_or_else(|| format!("{prefix}{number}"), |(_, name)| (*name).to_owned())
    };
    let families = [
        (libc::AF_UNIX, "AF_UNIX"),
        (libc::AF_INET, "AF_INET"),
        (libc::AF_INET6, "AF_INET6"),
        (libc::AF_NETLINK, "AF_NETLINK"),
        (libc::AF_PACKET, "AF_PACKET"),
        (libc::AF_VSOCK, "AF_VSOCK"),
        (libc::AF_BLUETOOTH, "AF_BLUETOOTH"),
        (libc::AF_ALG, "AF_ALG"),
    ];
    let kinds = [
        (libc::SOCK_STREAM, "SOCK_STREAM"),
        (libc::SOCK_DGRAM, "SOCK_DGRAM"),
        (libc::SOCK_RAW, "SOCK_RAW"),
        (libc::SOCK_SEQPACKET, "SOCK_SEQPACKET"),
    ];
    let mut text = format!(
        "{} {}",
        name(family, &families, "family "),
        name(kind & 0xf, &kinds, "type ")
    );
    if protocol != 0 {
        text.push_str(&format!(
            " {}",
            name(
                protocol,
                &[
                    (libc::IPPROTO_TCP, "IPPROTO_TCP"),
                    (libc::IPPROTO_UDP, "IPPROTO_UDP"),
                    (262, "IPPROTO_MPTCP")
                ],
                "protocol "
            )
        ));
    }
    text
}
