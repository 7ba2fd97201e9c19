//! What only namespaces of its own give a command. Everything that holds in every tier is tested elsewhere, in the tier that `DSH_TEST_TIER` names.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use dsh_policy::SandboxMode::{ReadOnly, WorkspaceWrite};
use dsh_policy::mode::{Guarantee, Tier};
use dsh_tests::machine::{Feature, can_run};
use dsh_tests::{Ran, User, World, users, world};

/// The users for whom the tier can be tried here; none when this run is about another tier.
fn tried_by(test: &str) -> Vec<User> {
    if world::tier().is_some_and(|tier| tier != Tier::Namespace) || !can_run(test, Feature::UserNamespaces) {
        return Vec::new();
    }
    users()
}

fn in_tier(user: User, toml: &str) -> World {
    World::with_config(user, &format!("tiers = [\"namespace\"]\n{toml}"))
}

/// The standard output of a command that must have ended well, in the tier.
fn text(ran: &Ran) -> String {
    assert!(ran.apart() && ran.code() == 0, "{ran:?}");
    ran.text().to_owned()
}

#[test]
fn processes_of_the_host_are_out_of_sight_and_the_command_is_not_the_first() {
    for user in tried_by("processes_of_the_host_are_out_of_sight_and_the_command_is_not_the_first") {
        let world = in_tier(user, "");
        let script = "echo $$ $PPID; cd /proc; for each in [0-9]*; do echo $each $(tr '\\0' ' ' <$each/cmdline); done";
        let seen = text(&world.run(ReadOnly, script));
        let lines: Vec<&str> = seen.lines().collect();
        assert_eq!(lines[0], "2 0", "{seen}");
        assert!(lines[2].starts_with("2 bash -c"), "{seen}");
        assert!(
            lines.len() <= 5,
            "the first process, the shell and what it forks: {seen}"
        );
    }
}

#[test]
fn shared_memory_and_system_v_objects_are_its_own() {
    for user in tried_by("shared_memory_and_system_v_objects_are_its_own") {
        let world = in_tier(user, "");
        let name = format!("dsh-test-{}-{}", std::process::id(), user.id());
        let outside = PathBuf::from("/dev/shm").join(&name);
        fs::write(&outside, b"host").unwrap();
        let script = format!("cat /dev/shm/{name} 2>&1; echo inside >/dev/shm/{name}-made; cat /dev/shm/{name}-made");
        let seen = text(&world.run(WorkspaceWrite, script));
        assert_eq!(seen, format!("cat: /dev/shm/{name}: No such file or directory\ninside"));
        assert!(!outside.with_file_name(format!("{name}-made")).exists());
        assert_eq!(fs::read(&outside).unwrap(), b"host");
        fs::remove_file(&outside).unwrap();

        let made = Command::new("ipcmk").args(["-Q"]).output().unwrap();
        let id = String::from_utf8(made.stdout).unwrap();
        let id = id.trim().rsplit(' ').next().unwrap().to_owned();
        let queues = "grep -vc key /proc/sysvipc/msg; ipcmk -Q >/dev/null; grep -vc key /proc/sysvipc/msg";
        let ran = world.run(WorkspaceWrite, format!("{queues}; true"));
        let removed = Command::new("ipcrm").args(["-q", &id]).status().unwrap();
        assert_eq!(text(&ran), "0\n1");
        assert_eq!(ran.facts(), []);
        assert!(removed.success(), "the host's queue is still there");
    }
}

#[test]
fn everything_but_the_writable_places_is_mounted_read_only() {
    for user in tried_by("everything_but_the_writable_places_is_mounted_read_only") {
        let world = in_tier(user, "");
        let workspace = world.workspace();
        let mounts = text(&world.run(WorkspaceWrite, "cut -d' ' -f5,6 /proc/self/mountinfo"));
        let flags = |path: &Path| {
            let wanted = path.display().to_string();
            let mut lines = mounts.lines().filter_map(|line| line.split_once(' '));
            let last = lines.rfind(|(point, _)| *point == wanted);
            last.unwrap_or_else(|| panic!("{wanted} is no mount: {mounts}"))
                .1
                .to_owned()
        };
        assert!(flags(Path::new("/")).starts_with("ro"), "{mounts}");
        for place in [&workspace, Path::new("/tmp"), Path::new("/dev/shm"), Path::new("/proc")] {
            assert!(flags(place).starts_with("rw"), "{}: {mounts}", place.display());
        }
        let mounts = text(&world.run(ReadOnly, "cut -d' ' -f5,6 /proc/self/mountinfo"));
        assert!(!mounts.contains(&workspace.display().to_string()), "{mounts}");
    }
}

#[test]
fn users_and_groups_look_the_same_inside() {
    for user in tried_by("users_and_groups_look_the_same_inside") {
        let world = in_tier(user, "");
        let own = world.workspace().join("own");
        world.write(&own, b"");
        let id = user.id();
        let script = format!(
            "id -u; id -g; stat -c %u:%g {}; touch made; stat -c %u:%g made",
            own.display()
        );
        let seen = text(&world.run(WorkspaceWrite, script));
        assert_eq!(seen, format!("{id}\n{id}\n{id}:{id}\n{id}:{id}"));
        if user == User::Root {
            let theirs = world.workspace().join("theirs");
            world.write(&theirs, b"");
            std::os::unix::fs::chown(&theirs, Some(1234), Some(2345)).unwrap();
            let seen = text(&world.run(WorkspaceWrite, format!("stat -c %u:%g {}", theirs.display())));
            assert_eq!(seen, "1234:2345");
        }
    }
}

const LOOPBACK: &str = r#"
import socket, sys
for family, at, address in (
    (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
    (socket.AF_INET6, "::1", "::1"),
    (socket.AF_INET6, "::", "::ffff:127.0.0.1"),
):
    server = socket.create_server((at, 0), family=family, dualstack_ipv6=at == "::")
    client = socket.create_connection((address, server.getsockname()[1]))
    peer = server.accept()[0]
    client.sendall(b"x")
    print(address, peer.recv(1).decode())
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5)
    print("host reached")
except ConnectionRefusedError:
    print("host refused")
"#;

#[test]
fn with_a_loopback_network_a_server_and_its_client_meet_and_the_host_is_not_there() {
    let test = "with_a_loopback_network_a_server_and_its_client_meet_and_the_host_is_not_there";
    if !can_run(test, Feature::Python) {
        return;
    }
    for user in tried_by(test) {
        let world = in_tier(user, "network = \"loopback\"\n");
        let host = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = host.local_addr().unwrap().port();
        let script = world.workspace().join("meet.py");
        world.write(&script, LOOPBACK.as_bytes());
        let ran = world.run(ReadOnly, format!("python3 {} {port}", script.display()));
        assert_eq!(text(&ran), "127.0.0.1 x\n::1 x\n::ffff:127.0.0.1 x\nhost refused");
        let confined = ran.result().sandbox.confined.unwrap();
        let lacks = |guarantee| confined.unenforced.iter().any(|lack| lack.guarantee == guarantee);
        assert!(!lacks(Guarantee::Network), "{confined:?}");
    }
}

#[test]
fn a_private_tmp_is_empty_at_first_and_gone_at_the_end() {
    for user in tried_by("a_private_tmp_is_empty_at_first_and_gone_at_the_end") {
        let world = in_tier(user, "tmp = \"private\"\n");
        let name = format!("dsh-test-private-{}-{}", std::process::id(), user.id());
        let script = format!("echo mine >/tmp/{name}; cat /tmp/{name}; echo $TMPDIR; touch $TMPDIR/a; ls /tmp");
        let seen = text(&world.run(WorkspaceWrite, script));
        let lines: Vec<&str> = seen.lines().collect();
        assert_eq!(lines[0], "mine");
        assert!(!Path::new("/tmp").join(&name).exists());
        assert!(!Path::new(lines[1]).exists(), "{seen}");
        let own = Path::new(lines[1]).file_name().unwrap().to_str().unwrap();
        for entry in &lines[2..] {
            assert!([name.as_str(), own, "a"].contains(entry), "not the host's: {seen}");
        }
    }
}
