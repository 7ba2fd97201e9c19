//! Sockets: the host's of the Unix family, and with network `none` everything that is not of that family.
use dsh_policy::denial::Operation as O;

use super::{Attack, attack, control, door, nothing, perhaps};

pub(crate) const UNIX: &[Attack] = &[
    door(&["connect-unix", "O/stream"], "connect", O::ConnectUnix),
    door(&["connect-unix-datagram", "O/datagram"], "connect", O::ConnectUnix),
    door(&["sendto-unix", "O/datagram"], "sendto", O::ConnectUnix),
    door(&["sendmsg-unix", "O/datagram"], "sendmsg", O::ConnectUnix),
    door(&["sendmsg-unix-raw", "O/datagram"], "sendmsg", O::ConnectUnix),
    door(&["sendmmsg-unix", "O/datagram"], "sendmmsg", O::ConnectUnix),
    door(&["sendmsg-unix-pair", "O/datagram"], "sendmsg", O::ConnectUnix),
    door(&["connect-abstract", "NAME"], "connect", O::ConnectUnix),
    door(&["sendto-abstract", "NAME-datagram"], "sendto", O::ConnectUnix),
    door(&["sendmsg-abstract", "NAME-datagram"], "sendmsg", O::ConnectUnix),
    nothing(&["connect-unix", "O/file"], "ECONNREFUSED"),
    nothing(&["connect-unix", "O/made"], "ENOENT"),
    nothing(&["unix-pair"], "OK"),
];

pub(crate) const NETWORK: &[Attack] = &[
    door(&["tcp-connect", "TCP"], "socket", O::CreateSocket),
    door(&["tcp-connect-mapped", "TCP"], "socket", O::CreateSocket),
    perhaps(&["tcp-fastopen", "TCP"], "socket", O::CreateSocket),
    perhaps(&["tcp-fastopen-msg", "TCP"], "socket", O::CreateSocket),
    perhaps(&["mptcp-connect", "TCP"], "socket", O::CreateSocket),
    perhaps(&["sctp-socket"], "socket", O::CreateSocket),
    door(&["udp-connect", "UDP"], "socket", O::CreateSocket),
    door(&["udp-send", "UDP"], "socket", O::CreateSocket),
    door(&["udp-sendmsg", "UDP"], "socket", O::CreateSocket),
    door(&["udp-sendmmsg", "UDP"], "socket", O::CreateSocket),
    perhaps(&["udplite-socket"], "socket", O::CreateSocket),
    perhaps(&["ping-socket"], "socket", O::CreateSocket),
    door(&["raw-socket"], "socket", O::CreateSocket),
    perhaps(&["packet-socket"], "socket", O::CreateSocket),
    door(&["netlink-uevent"], "socket", O::CreateSocket),
    door(&["netlink-generic"], "socket", O::CreateSocket),
    perhaps(&["vsock-socket"], "socket", O::CreateSocket),
    perhaps(&["alg-socket"], "socket", O::CreateSocket),
    perhaps(&["bluetooth-socket"], "socket", O::CreateSocket),
    door(&["tcp-bind", "0"], "socket", O::CreateSocket),
    door(&["tcp-listen"], "socket", O::CreateSocket),
    // The list of interfaces.
    nothing(&["netlink-route"], "OK"),
];

#[test]
fn sockets_of_the_host_hear_nothing() {
    attack("full", UNIX);
}

#[test]
fn without_a_network_there_is_none() {
    attack("none", NETWORK);
}

#[test]
fn unconfined_the_doors_to_sockets_are_open() {
    control(UNIX);
    control(NETWORK);
}
