//! Pseudo terminals: a command makes and uses its own, those of the user's other programs are out of reach.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;

use dsh_policy::SandboxMode::{ReadOnly, WorkspaceWrite};
use dsh_policy::denial::{Errno, Operation, Rule};
use dsh_tests::{User, World, users};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

/// A terminal that the user had before, by both of its ends.
fn foreign_terminal(user: User) -> (OwnedFd, PathBuf) {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let path = PathBuf::from(ptsname(&master, Vec::new()).unwrap().into_string().unwrap());
    std::os::unix::fs::chown(&path, Some(user.id()), None).unwrap();
    (master, path)
}

#[test]
fn a_command_works_in_a_terminal_of_its_own() {
    for user in users() {
        let world = World::new(user);
        let inner = "tty; test -w $(tty) && echo hello > $(tty); stty size";
        let ran = world.run(WorkspaceWrite, format!("script -qec '{inner}' /dev/null < /dev/null"));
        let text = ran.text();
        let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
        assert!(lines[0].starts_with("/dev/pts/"), "{user:?} {text}");
        assert_eq!(&lines[1..], ["hello", "0 0"], "{user:?} {text}");
        assert_eq!(ran.facts(), [], "{user:?}");
    }
}

#[test]
fn the_terminal_of_another_program_is_refused_with_a_fact() {
    for user in users() {
        let world = World::new(user);
        let (master, path) = foreign_terminal(user);
        for (mode, rule) in [
            (WorkspaceWrite, Rule::OutsideWritableRoots),
            (ReadOnly, Rule::ReadOnlyMode),
        ] {
            let ran = world.run(mode, world.probe(&["open-wronly".into(), path.display().to_string()]));
            assert_eq!(ran.text(), "EACCES", "{user:?} {mode}");
            let facts = ran.facts();
            let told: Vec<_> = facts
                .iter()
                .map(|fact| {
                    (
                        fact.operation,
                        fact.errno,
                        fact.rule,
                        fact.path.as_ref().unwrap().to_path_buf(),
                    )
                })
                .collect();
            let expected = [(Operation::WriteFile, Errno::Eacces, rule, path.clone())];
            assert_eq!(told, expected, "{user:?} {mode}");
        }
        rustix::io::ioctl_fionbio(&master, true).unwrap();
        let received = File::from(master.as_fd().try_clone_to_owned().unwrap()).read(&mut [0; 16]);
        assert_eq!(received.unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "{user:?}");
    }
}

#[test]
fn nothing_makes_a_terminal_in_read_only() {
    let world = World::new(users()[0]);
    let ran = world.run(ReadOnly, world.probe(&["open-rdwr".into(), "/dev/ptmx".into()]));
    assert_eq!(ran.text(), "EACCES");
    assert_eq!(ran.facts().len(), 1);
}
