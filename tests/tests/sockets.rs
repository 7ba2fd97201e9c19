//! Unix sockets: what a command makes itself works in every way to reach it; what is the host's is refused in every way, is a fact, and hears nothing.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::path::Path;

use dsh_policy::SandboxMode::{ReadOnly, WorkspaceWrite};
use dsh_policy::denial::Operation::ConnectUnix;
use dsh_policy::denial::Rule::UnixSocket;
use dsh_tests::machine::{Feature, can_run};
use dsh_tests::{User, World, users};

/// A line of outcome per way; `sys.argv[1]` is a folder for own sockets.
const OWN: &str = r#"
import array, errno, os, socket, sys, threading
folder = sys.argv[1]
def unix(kind=socket.SOCK_STREAM): return socket.socket(socket.AF_UNIX, kind)
def stream(name):
    server = unix(); server.bind(name); server.listen()
    client = unix(); client.connect(name); peer, _ = server.accept()
    client.sendmsg([b"ab", b"c"]); return peer.recv(9)
def late():
    # A client that waits for room in the queue holds up nobody.
    server = unix(); server.bind(folder + "/late"); server.listen(0)
    clients = [unix() for _ in range(4)]
    threads = [threading.Thread(target=client.connect, args=(folder + "/late",)) for client in clients]
    for thread in threads: thread.start()
    open(folder + "/meanwhile", "w").close()
    for _ in clients: server.accept()
    for thread in threads: thread.join()
    return len(clients)
def nonblocking():
    server = unix(); server.bind(folder + "/queue"); server.listen(0)
    made = []
    while True:
        client = unix(); client.setblocking(False); made.append(client)
        try: client.connect(folder + "/queue")
        except BlockingIOError: return "full"
def datagram():
    server, client = unix(socket.SOCK_DGRAM), unix(socket.SOCK_DGRAM)
    server.bind(folder + "/datagram")
    os.chdir(folder)
    client.sendto(b"1", folder + "/datagram"); client.sendto(b"2", "datagram")
    client.sendmsg([b"3", b"4"], [], 0, folder + "/datagram")
    client.connect("datagram"); client.send(b"5"); client.sendmsg([b"6"])
    return b"".join(server.recv(9) for _ in range(5))
def passing():
    server, client = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    reader, writer = os.pipe()
    client.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writer]))])
    _, control, _, _ = server.recvmsg(9, 99)
    os.write(array.array("i", control[0][2])[0], b"through"); return os.read(reader, 9)
def large():
    left, right = socket.socketpair(); size = 900_000; got = []
    def read():
        while sum(map(len, got)) < size: got.append(right.recv(1 << 20))
    reader = threading.Thread(target=read); reader.start()
    sent = left.sendmsg([b"x" * size]); reader.join(); return sent == size
def closed():
    left, right = socket.socketpair(); right.close(); left.sendmsg([b"x"])
def missing(): unix().connect(folder + "/nothing")
def no_socket(): unix().connect(sys.argv[0])
def nobody(): unix().connect("\0dsh-test-nobody-%d" % os.getpid())
def tcp(family, host):
    server = socket.socket(family); server.bind((host, 0)); server.listen()
    socket.create_connection(server.getsockname()[:2]); return server.accept()[0].fileno() > 2
def udp():
    server, client = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
    server.bind(("127.0.0.1", 0)); client.sendto(b"1", server.getsockname())
    client.sendmsg([b"2"], [], 0, server.getsockname()); return server.recv(9) + server.recv(9)
ways = [lambda: stream(folder + "/stream"), lambda: stream("\0dsh-test-%d" % os.getpid()), late, nonblocking, datagram, passing, large,
        closed, missing, no_socket, nobody]
if len(sys.argv) > 2: ways += [lambda: tcp(socket.AF_INET, "127.0.0.1"), lambda: tcp(socket.AF_INET6, "::1"), udp]
for way in ways:
    try: print(way())
    except OSError as error: print(errno.errorcode[error.errno])
"#;
const OWN_WORKS: [&str; 11] = [
    "b'abc'",
    "b'abc'",
    "4",
    "full",
    "b'123456'",
    "b'through'",
    "True",
    "EPIPE",
    "ENOENT",
    "ECONNREFUSED",
    "ECONNREFUSED",
];

/// Each way to reach the host's sockets in the folder `sys.argv[1]`, and its abstract ones of the name `sys.argv[2]`.
const HOST: &str = r#"
import errno, os, socket, sys
folder, name = sys.argv[1], "\0" + sys.argv[2]
def unix(kind=socket.SOCK_STREAM): return socket.socket(socket.AF_UNIX, kind)
D = socket.SOCK_DGRAM
os.chdir(folder)
for way in [
    lambda: unix().connect(folder + "/stream"),
    lambda: unix().connect("stream"),
    lambda: unix().connect("/proc/self/cwd/stream"),
    lambda: unix(D).connect(folder + "/datagram"),
    lambda: unix(D).sendto(b"x", folder + "/datagram"),
    lambda: unix(D).sendmsg([b"x"], [], 0, folder + "/datagram"),
    lambda: socket.socketpair(socket.AF_UNIX, D)[0].sendmsg([b"x"], [], 0, folder + "/datagram"),
    lambda: unix(socket.SOCK_RAW).sendmsg([b"x"], [], 0, folder + "/datagram"),
    lambda: unix().connect(name),
    lambda: unix(D).sendto(b"x", name + "-datagram"),
    lambda: unix(D).sendmsg([b"x"], [], 0, name + "-datagram"),
]:
    try: way(); print("ok")
    except OSError as error: print(errno.errorcode[error.errno])
"#;
/// Whether a path, and the call, of each refusal above.
const HOST_FACTS: [(&str, &str); 11] = [
    ("stream", "connect"),
    ("stream", "connect"),
    ("stream", "connect"),
    ("datagram", "connect"),
    ("datagram", "sendto"),
    ("datagram", "sendmsg"),
    ("datagram", "sendmsg"),
    ("datagram", "sendmsg"),
    ("@", "connect"),
    ("@-datagram", "sendto"),
    ("@-datagram", "sendmsg"),
];

/// Sockets of the user's, outside.
struct Host {
    streams: [UnixListener; 2],
    datagrams: [UnixDatagram; 2],
    name: String,
}

impl Host {
    fn new(folder: &Path, user: User) -> Self {
        let name = dsh_tests::process::unique_mark("socket").replace('=', "-");
        let abstract_name = |suffix: &str| SocketAddr::from_abstract_name(format!("{name}{suffix}")).unwrap();
        let host = Self {
            streams: [
                UnixListener::bind(folder.join("stream")).unwrap(),
                UnixListener::bind_addr(&abstract_name("")).unwrap(),
            ],
            datagrams: [
                UnixDatagram::bind(folder.join("datagram")).unwrap(),
                UnixDatagram::bind_addr(&abstract_name("-datagram")).unwrap(),
            ],
            name,
        };
        for name in ["stream", "datagram"] {
            user.own(&folder.join(name));
        }
        host
    }

    /// Nobody came, and nothing arrived.
    fn assert_untouched(&self) {
        for stream in &self.streams {
            stream.set_nonblocking(true).unwrap();
            assert_eq!(stream.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        }
        for datagram in &self.datagrams {
            datagram.set_nonblocking(true).unwrap();
            assert_eq!(datagram.recv(&mut [0; 9]).unwrap_err().kind(), ErrorKind::WouldBlock);
        }
    }
}

fn python(world: &World, script: &str, arguments: &[&str]) -> String {
    let file = world.folder().join("script.py");
    world.write(&file, script.as_bytes());
    let words = arguments.iter().map(|word| format!(" '{word}'")).collect::<String>();
    format!("exec python3 '{}'{words}", file.display())
}

#[test]
fn sockets_of_the_command_work_in_every_way() {
    if !can_run("sockets_of_the_command_work_in_every_way", Feature::Python) {
        return;
    }
    for user in users() {
        for network in ["full", "loopback", "none"] {
            let world = World::new(user);
            let inet = network != "none";
            let folder = world.workspace();
            let mut arguments = vec![folder.to_str().unwrap()];
            arguments.extend(inet.then_some("inet"));
            let command = python(&world, OWN, &arguments);
            let ran = world.run_with(WorkspaceWrite, &["--network", network].map(OsStr::new), command);
            let mut expected = OWN_WORKS.to_vec();
            expected.extend(inet.then_some(["True", "True", "b'12'"]).into_iter().flatten());
            assert_eq!(
                ran.text().lines().collect::<Vec<_>>(),
                expected,
                "{user:?} {network} {ran:?}"
            );
            assert_eq!(ran.facts(), [], "{user:?} {network}");
        }
    }
}

#[test]
fn sockets_of_the_host_are_refused_in_every_way_and_hear_nothing() {
    if !can_run(
        "sockets_of_the_host_are_refused_in_every_way_and_hear_nothing",
        Feature::Python,
    ) {
        return;
    }
    for user in users() {
        for mode in [ReadOnly, WorkspaceWrite] {
            let world = World::new(user);
            let outside = world.outside();
            let host = Host::new(&outside, user);
            let ran = world.run(mode, python(&world, HOST, &[outside.to_str().unwrap(), &host.name]));
            assert_eq!(
                ran.text().lines().collect::<Vec<_>>(),
                ["EACCES"; 11],
                "{user:?} {mode:?} {ran:?}"
            );
            host.assert_untouched();
            let facts = ran.facts();
            let seen: u64 = facts.iter().map(|fact| fact.count).sum();
            assert_eq!(seen, 11, "{facts:#?}");
            for (place, syscall) in HOST_FACTS {
                let known = facts.iter().any(|fact| {
                    let here = match place.strip_prefix('@') {
                        Some(suffix) => fact.path.is_none() && fact.detail == Some(format!("@{}{suffix}", host.name)),
                        None => fact.path.as_ref().map(|path| path.to_path_buf()) == Some(outside.join(place)),
                    };
                    here && fact.syscall == syscall && (fact.operation, fact.rule) == (ConnectUnix, UnixSocket)
                });
                assert!(known, "{user:?} {mode:?} no fact of {syscall} {place}: {facts:#?}");
            }
        }
    }
}

#[test]
fn a_listed_socket_is_reached_and_its_server_sees_the_same_user() {
    if !can_run(
        "a_listed_socket_is_reached_and_its_server_sees_the_same_user",
        Feature::Python,
    ) {
        return;
    }
    for user in users() {
        let mut world = World::without_daemon(user, "");
        let outside = world.outside();
        let config = format!(
            "allowUnixSocket = [\"{0}/stream\", \"{0}/datagram\"]\n",
            outside.display()
        );
        world.write(&world.config_file(), config.as_bytes());
        world.start_daemon();
        let host = Host::new(&outside, user);
        let script = "import socket, sys; c = socket.socket(socket.AF_UNIX); c.connect(sys.argv[1] + '/stream'); c.send(b'hello'); \
            d = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); d.sendmsg([b'a', b'b'], [], 0, sys.argv[1] + '/datagram')";
        let ran = world.run(ReadOnly, python(&world, script, &[outside.to_str().unwrap()]));
        assert_eq!((ran.code(), ran.facts()), (0, vec![]), "{ran:?}");
        let (stream, _) = host.streams[0].accept().unwrap();
        let peer = rustix::net::sockopt::socket_peercred(&stream).unwrap();
        assert_eq!((peer.uid.as_raw(), peer.gid.as_raw()), (user.id(), user.id()));
        let mut text = [0; 9];
        let length = host.datagrams[0].recv(&mut text).unwrap();
        assert_eq!(&text[..length], b"ab");
    }
}

/// A call that waits for a server that never answers ends with the command, and nothing else of the command waits for it.
#[test]
fn a_connect_that_waits_for_ever_ends_with_the_command() {
    if !can_run("a_connect_that_waits_for_ever_ends_with_the_command", Feature::Python) {
        return;
    }
    let script = "import os, socket, sys\n\
        path = sys.argv[1] + '/full'\n\
        server = socket.socket(socket.AF_UNIX); server.bind(path); server.listen(0)\n\
        while os.fork(): socket.socket(socket.AF_UNIX).connect(path)\n\
        open(sys.argv[1] + '/child', 'w').close(); print('made', flush=True)\n\
        socket.socket(socket.AF_UNIX).connect(path)";
    for user in users() {
        let world = World::new(user);
        let command = python(&world, script, &[world.workspace().to_str().unwrap()]);
        let ran = world.run_with(WorkspaceWrite, &["--timeout-ms", "1500"].map(OsStr::new), command);
        let result = ran.result();
        assert!(result.timed_out, "{ran:?}");
        assert_eq!(result.survivors, 0);
        assert!(result.stdout.text.contains("made"), "{ran:?}");
    }
}
