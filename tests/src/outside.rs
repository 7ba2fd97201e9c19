//! Things of the user's that no command was given: a process, System V objects, sockets, servers, files. And a picture of them all, to see whether
//! something has happened to one.
use std::fmt::Write as _;
use std::fs;
use std::net::{TcpListener, UdpSocket};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Stdio};

use crate::{User, World, fixture, process, tree};

/// Everything that an attack of the suite aims at. It is removed when this is dropped.
pub struct Outside {
    folder: PathBuf,
    user: User,
    victim: Child,
    /// Address of a byte of the victim's that may be written to.
    address: u64,
    objects: [String; 3],
    name: String,
    stream: UnixListener,
    datagram: UnixDatagram,
    abstract_stream: UnixListener,
    abstract_datagram: UnixDatagram,
    tcp: TcpListener,
    udp: UdpSocket,
}

impl Outside {
    /// Lays everything afresh in the world's `outside`.
    #[must_use]
    pub fn new(world: &World) -> Self {
        let folder = world.outside();
        fixture::lay(&folder, world.user);
        let name = process::unique_mark("outside").replace('=', "-");
        let at = |suffix: &str| SocketAddr::from_abstract_name(format!("{name}{suffix}")).unwrap();
        let (stream, datagram) = (folder.join("stream"), folder.join("datagram"));
        let (stream_socket, datagram_socket) = (
            UnixListener::bind(&stream).unwrap(),
            UnixDatagram::bind(&datagram).unwrap(),
        );
        world.user.own(&stream);
        world.user.own(&datagram);
        let mut victim = world.command("sleep");
        let victim = victim
            .arg("1000")
            .process_group(0)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut outside = Self {
            address: 0,
            objects: ["-M4096", "-Q", "-S1"].map(|kind| make_object(world, kind)),
            stream: stream_socket,
            datagram: datagram_socket,
            abstract_stream: UnixListener::bind_addr(&at("")).unwrap(),
            abstract_datagram: UnixDatagram::bind_addr(&at("-datagram")).unwrap(),
            tcp: TcpListener::bind("127.0.0.1:0").unwrap(),
            udp: UdpSocket::bind("127.0.0.1:0").unwrap(),
            user: world.user,
            folder,
            victim,
            name,
        };
        // Once it sleeps, its memory is what it stays.
        process::wait_until(std::time::Duration::from_secs(10), || {
            outside.state().0.starts_with("(sleep) S")
        });
        outside.address = outside.writable_address();
        outside.quiet();
        outside
    }

    fn quiet(&self) {
        self.stream.set_nonblocking(true).unwrap();
        self.abstract_stream.set_nonblocking(true).unwrap();
        self.datagram.set_nonblocking(true).unwrap();
        self.abstract_datagram.set_nonblocking(true).unwrap();
        self.tcp.set_nonblocking(true).unwrap();
        self.udp.set_nonblocking(true).unwrap();
    }

    /// Replaces the names that rows use for what is here.
    #[must_use]
    pub fn fill(&self, word: &str) -> String {
        let folder = self.folder.to_str().unwrap();
        let [memory, queue, semaphore] = &self.objects;
        match word {
            "O" => folder.to_owned(),
            "VICTIM" => self.victim.id().to_string(),
            "ADDRESS" => self.address.to_string(),
            "SHM" => memory.clone(),
            "MSG" => queue.clone(),
            "SEM" => semaphore.clone(),
            "NAME" => self.name.clone(),
            "NAME-datagram" => format!("{}-datagram", self.name),
            "TCP" => self.tcp.local_addr().unwrap().port().to_string(),
            "UDP" => self.udp.local_addr().unwrap().port().to_string(),
            word => match word.strip_prefix("O/") {
                Some(rest) => format!("{folder}/{rest}"),
                None => word.replace("VICTIM", &self.victim.id().to_string()),
            },
        }
    }

    /// All that an attack could have changed, as text. What has arrived at a socket is taken out.
    #[must_use]
    pub fn picture(&self) -> String {
        let (name_and_state, fields) = self.state();
        let pid = self.victim.id();
        let mut text = format!("victim {name_and_state} {fields}\n");
        for file in ["limits", "oom_score_adj", "comm", "cgroup"] {
            let _ = writeln!(
                text,
                "{file} {:?}",
                fs::read_to_string(format!("/proc/{pid}/{file}")).ok()
            );
        }
        for field in ["Cpus_allowed:", "TracerPid:", "SigPnd:", "ShdPnd:"] {
            let _ = writeln!(text, "{field} {:?}", process::status_field(pid, field));
        }
        let priority = std::process::Command::new("ionice")
            .arg("-p")
            .arg(pid.to_string())
            .output();
        let _ = writeln!(text, "io {:?}", priority.map(|output| output.stdout).ok());
        let mut byte = [0];
        let memory = fs::File::open(format!("/proc/{pid}/mem")).and_then(|file| file.read_at(&mut byte, self.address));
        let _ = writeln!(text, "memory {byte:?} {:?}", memory.ok());
        for (kind, id) in ["shm", "msg", "sem"].iter().zip(&self.objects) {
            let list = fs::read_to_string(format!("/proc/sysvipc/{kind}")).unwrap_or_default();
            let line = list.lines().find(|line| line.split_whitespace().nth(1) == Some(id));
            let _ = writeln!(text, "{kind} {line:?}");
        }
        let mut bytes = [0; 64];
        let _ = writeln!(text, "stream {:?}", self.stream.accept().is_ok());
        let _ = writeln!(text, "abstract {:?}", self.abstract_stream.accept().is_ok());
        let _ = writeln!(text, "datagram {:?}", self.datagram.recv(&mut bytes).ok());
        let _ = writeln!(
            text,
            "abstract datagram {:?}",
            self.abstract_datagram.recv(&mut bytes).ok()
        );
        let _ = writeln!(text, "tcp {:?}", self.tcp.accept().is_ok());
        let _ = writeln!(text, "udp {:?}", self.udp.recv(&mut bytes).ok());
        let _ = writeln!(text, "files {:?}", tree::picture(&self.folder));
        text
    }

    /// Name and state of the victim, and its priority, niceness, class and real-time priority. What it used is left out.
    fn state(&self) -> (String, String) {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.victim.id())).unwrap_or_default();
        let words: Vec<_> = stat.split_whitespace().collect();
        let pick = |indices: &[usize]| {
            let found: Vec<_> = indices
                .iter()
                .map(|index| words.get(*index).copied().unwrap_or("gone"))
                .collect();
            found.join(" ")
        };
        (pick(&[1, 2]), pick(&[4, 5, 17, 18, 39, 40]))
    }

    fn writable_address(&self) -> u64 {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.victim.id())).unwrap();
        let line = maps
            .lines()
            .find(|line| line.contains(" rw-p "))
            .expect("the victim has memory");
        u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap()
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        let _ = self.victim.kill();
        let _ = self.victim.wait();
        let mut remove = std::process::Command::new("ipcrm");
        self.user.apply(&mut remove);
        let [memory, queue, semaphore] = &self.objects;
        // One that an attack has removed gives an error that does not matter.
        let _ = remove
            .args(["-m", memory, "-q", queue, "-s", semaphore])
            .stderr(Stdio::null())
            .status();
    }
}

/// The id of a new System V object.
fn make_object(world: &World, kind: &str) -> String {
    let output = world
        .command("ipcmk")
        .args([kind, "-p", "0600"])
        .output()
        .expect("ipcmk of util-linux");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.rsplit(' ')
        .next()
        .map(|id| id.trim().to_owned())
        .filter(|id| !id.is_empty())
        .unwrap_or_else(|| panic!("{output:?}"))
}
