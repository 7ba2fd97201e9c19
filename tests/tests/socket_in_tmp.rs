//! Without a runtime folder the daemon's socket lies below `/tmp`, which commands may write: they still cannot reach, remove or replace it.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use dsh_policy::denial::Operation::{ConnectUnix, CreateFile, MakeNode, RemoveFile, Rename};
use dsh_policy::denial::Rule::{ProtectedPath, UnixSocket};
use dsh_tests::{Ran, User, World, process, users};

/// Tries each way at the folder `sys.argv[1]` and prints its outcome; the last ones are the command's own business and work.
const WAYS: &str = r#"
import errno, os, socket, sys
folder, own = sys.argv[1:]
there = folder + "/socket"
open(own, "w").close()
def unix(kind=socket.SOCK_STREAM): return socket.socket(socket.AF_UNIX, kind)
def serve(path):
    server = unix(); server.bind(path); server.listen(); unix().connect(path)
for way in [
    lambda: unix().connect(there),
    lambda: os.unlink(there),
    lambda: os.rename(there, own + "-taken"),
    lambda: os.rename(own, there),
    lambda: os.rename(folder, own + "-folder"),
    lambda: unix().bind(folder + "/another"),
    lambda: open(folder + "/file", "x"),
    lambda: serve(own + "-server"),
    lambda: os.unlink(own),
]:
    try: way(); print("ok")
    except OSError as error: print(errno.errorcode[error.errno])
"#;

/// A daemon that has no `XDG_RUNTIME_DIR`; it ends, and its folder goes, with this.
struct InTmp {
    daemon: Child,
    folder: PathBuf,
}

impl InTmp {
    /// None when another daemon of this user's serves that place already.
    fn start(world: &World) -> Option<Self> {
        let mut daemon = world.command(world.binary("dsh-execd"));
        daemon
            .env_remove("XDG_RUNTIME_DIR")
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut started = Self {
            daemon: daemon.spawn().unwrap(),
            folder: format!("/tmp/dsh-execd-{}", world.user.id()).into(),
        };
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            if started.daemon.try_wait().unwrap().is_some() {
                eprintln!("left out: another daemon uses {}", started.folder.display());
                started.folder = PathBuf::new();
                return None;
            }
            if serves(&started.folder, started.daemon.id()) {
                return Some(started);
            }
            assert!(
                Instant::now() < deadline,
                "the daemon does not listen in {}",
                started.folder.display()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for InTmp {
    fn drop(&mut self) {
        if self.daemon.try_wait().ok().flatten().is_none() {
            process::signal(self.daemon.id(), rustix::process::Signal::TERM);
        }
        let _ = self.daemon.wait();
        if !self.folder.as_os_str().is_empty() {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }
}

/// Whether the process behind the socket is this one, not one that was there before.
fn serves(folder: &Path, pid: u32) -> bool {
    let Ok(stream) = UnixStream::connect(folder.join("socket")) else {
        return false;
    };
    let peer = rustix::net::sockopt::socket_peercred(&stream).unwrap();
    peer.pid.as_raw_nonzero().get().cast_unsigned() == pid
}

fn run(world: &World, script: &Path, arguments: [&Path; 2]) -> Ran {
    let mut command = world.dsh_exec(
        &[
            "run",
            "--mode",
            "workspace-write",
            "--no-autostart",
            "--json",
            "--workspace",
        ]
        .map(AsRef::as_ref),
    );
    let [folder, own] = arguments.map(Path::display);
    command
        .env_remove("XDG_RUNTIME_DIR")
        .arg(world.workspace())
        .arg("--")
        .arg(format!("python3 {} {folder} {own}", script.display()));
    Ran::of(command.output().unwrap())
}

#[test]
fn a_command_cannot_reach_remove_or_replace_the_daemon_s_socket() {
    for user in users() {
        let world = World::without_daemon(user, "");
        let Some(in_tmp) = InTmp::start(&world) else { continue };
        let folder = in_tmp.folder.as_path();
        let (socket, script) = (folder.join("socket"), world.workspace().join("ways.py"));
        world.write(&script, WAYS.as_bytes());
        let own_folder = own_folder(user);
        let own = own_folder.path().join("own");

        let ran = run(&world, &script, [folder, &own]);

        let refused = ["EACCES"; 7].into_iter().chain(["ok"; 2]).collect::<Vec<_>>();
        assert_eq!(ran.text().lines().collect::<Vec<_>>(), refused, "{user:?} {ran:?}");
        let facts: Vec<_> = ran
            .facts()
            .into_iter()
            .map(|fact| {
                (
                    fact.operation,
                    fact.syscall,
                    fact.path.map(|path| path.to_path_buf()),
                    fact.rule,
                )
            })
            .collect();
        let fact =
            |operation, syscall: &str, path: &Path, rule| (operation, syscall.into(), Some(path.to_owned()), rule);
        let expected = [
            fact(ConnectUnix, "connect", &socket, UnixSocket),
            fact(RemoveFile, "unlink", &socket, ProtectedPath),
            fact(Rename, "rename", &socket, ProtectedPath),
            fact(Rename, "rename", &own, ProtectedPath),
            fact(Rename, "rename", folder, ProtectedPath),
            fact(MakeNode, "bind", &folder.join("another"), ProtectedPath),
            fact(CreateFile, "openat", &folder.join("file"), ProtectedPath),
        ];
        assert_eq!(facts, expected, "{user:?}");
        assert!(serves(folder, in_tmp.daemon.id()), "{user:?}");
    }
}

/// A folder below `/tmp` that the user owns.
fn own_folder(user: User) -> tempfile::TempDir {
    let folder = tempfile::Builder::new().prefix("dsh-test-").tempdir_in("/tmp").unwrap();
    user.own(folder.path());
    folder
}
