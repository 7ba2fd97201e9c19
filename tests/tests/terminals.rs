//! Pseudo terminals: a command makes and uses its own, those of the user's other programs are out of reach.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;

use dsh_policy::SandboxMode::{DangerFullAccess, ReadOnly, WorkspaceWrite};
use dsh_policy::denial::{Errno, Operation, Rule};
use dsh_policy::request::TerminalSize;
use dsh_policy::wire::{ClientMessage, Encoding, ServerMessage};
use dsh_policy::{BashExecRequest, BashRunResult, ErrorCode, PolicyRequest, SandboxMode};
use dsh_tests::wire::Peer;
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

fn with_terminal(world: &World, mode: SandboxMode, command: &str) -> BashExecRequest {
    BashExecRequest {
        command: command.into(),
        tty: Some(TerminalSize { rows: 33, cols: 77 }),
        stdin_open: true,
        sandbox_policy: Some(PolicyRequest {
            mode: Some(mode),
            workspace_root: Some(world.workspace().into()),
            ..PolicyRequest::default()
        }),
        ..BashExecRequest::default()
    }
}

/// Runs with a terminal; when the output so far ends in a key of `typed`, its value is sent.
fn run_in_terminal(
    world: &World,
    encoding: Encoding,
    request: BashExecRequest,
    typed: &[(&str, ClientMessage)],
) -> BashRunResult {
    let mut peer = Peer::hello(&world.socket(), encoding);
    let request = Box::new(request);
    peer.send(&ClientMessage::Run {
        id: 1,
        request,
        stream: true,
    });
    let (mut seen, mut next) = (String::new(), 0);
    loop {
        match peer.message().expect("an answer") {
            ServerMessage::Output { data, .. } => seen.push_str(&data.display()),
            ServerMessage::Finished { result, .. } => {
                assert_eq!(next, typed.len(), "{seen:?}");
                return *result;
            }
            ServerMessage::Error { error, .. } => panic!("{error:?}"),
            _ => {}
        }
        while let Some((_, message)) = typed.get(next).filter(|(after, _)| seen.contains(after)) {
            peer.send(message);
            next += 1;
        }
    }
}

fn key(text: &str) -> ClientMessage {
    ClientMessage::Stdin {
        id: 1,
        data: text.into(),
        eof: false,
    }
}

#[test]
fn a_request_s_terminal_is_the_command_s_own_in_every_mode() {
    let inner = "test -t 0 && test -t 1 && test -t 2 && stty size; echo by-name > $(tty); echo by-dev > /dev/tty; ps -o tpgid= -p $$ | grep -qw $$ && echo leads; echo $TERM";
    // Only the same user may connect, and this process is the first of them.
    for user in [users()[0]] {
        let world = World::new(user);
        for mode in [ReadOnly, WorkspaceWrite, DangerFullAccess] {
            for encoding in [Encoding::Json, Encoding::Bincode] {
                let mut request = with_terminal(&world, mode, inner);
                request.ambient_env =
                    Some([("PATH".into(), "/usr/bin:/bin".into()), ("TERM".into(), "vt220".into())].into());
                let result = run_in_terminal(&world, encoding, request, &[]);
                let expected = "33 77\r\nby-name\r\nby-dev\r\nleads\r\nvt220\r\n";
                assert_eq!(result.stdout.text, expected, "{user:?} {mode} {result:?}");
                assert_eq!(
                    (result.exit_code, result.stderr.bytes, result.survivors),
                    (Some(0), 0, 0)
                );
                let facts = result.sandbox.confined.map_or(0, |confined| confined.denials.len());
                assert_eq!(facts, 0, "{user:?} {mode}");
            }
        }
    }
}

#[test]
fn what_is_typed_arrives_ctrl_c_interrupts_a_new_size_is_told_and_ctrl_d_ends_the_input() {
    // Only the same user may connect, and this process is the first of them.
    for user in [users()[0]] {
        let world = World::new(user);
        for mode in [ReadOnly, WorkspaceWrite, DangerFullAccess] {
            let command = "trap 'echo got-int; int=1' INT; trap 'echo got-winch $(stty size)' WINCH; stty -echo; echo ready; \
                read line; echo \"line=$line\"; echo waiting; while [ -z \"$int\" ]; do sleep 0.05; done; echo sizing; sleep 100 & wait; wait $!; cat; echo end";
            let command = command.replace("sleep 100 & wait; wait $!;", "read other; echo \"$other\";");
            let size = TerminalSize { rows: 10, cols: 20 };
            let typed = [
                ("ready", key("hello\n")),
                ("waiting", key("\u{3}")),
                ("sizing", ClientMessage::Resize { id: 1, size }),
                ("sizing", key("more\n")),
                ("more", key("x\n\u{4}")),
            ];
            let result = run_in_terminal(&world, Encoding::Json, with_terminal(&world, mode, &command), &typed);
            let text = &result.stdout.text;
            for part in [
                "line=hello\r\n",
                "got-int\r\n",
                "got-winch 10 20\r\n",
                "more\r\n",
                "x\r\nend\r\n",
            ] {
                assert!(text.contains(part), "{user:?} {mode} {part:?}: {result:?}");
            }
            assert_eq!((result.exit_code, result.survivors), (Some(0), 0));
        }
    }
}

#[test]
fn wrong_terminals_are_refused_with_the_reason() {
    let world = World::new(users()[0]);
    let good = || with_terminal(&world, ReadOnly, "true");
    let none = BashExecRequest {
        tty: Some(TerminalSize { rows: 0, cols: 80 }),
        ..good()
    };
    let text = BashExecRequest {
        stdin: Some("x".into()),
        stdin_open: false,
        ..good()
    };
    for (request, message) in [
        (
            none,
            "invalid tty: expected rows and cols from 1 to 65535, got 0 and 80",
        ),
        (
            text,
            "invalid stdin: a command with `tty` is typed to while it runs; set `stdinOpen` and send `stdin` messages",
        ),
    ] {
        let mut peer = Peer::hello(&world.socket(), Encoding::Json);
        let request = Box::new(request);
        peer.send(&ClientMessage::Run {
            id: 1,
            request,
            stream: false,
        });
        match peer.last_answer(1) {
            ServerMessage::Error { error, .. } => {
                assert_eq!(
                    (error.code, error.message.as_str()),
                    (ErrorCode::InvalidRequest, message)
                );
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn typing_into_a_terminal_for_its_user_is_refused_with_a_fact() {
    let command = "python3 -c 'import fcntl\ntry: fcntl.ioctl(0, 0x5412, b\"x\")\nexcept OSError as e: print(e.errno)'";
    // Only the same user may connect, and this process is the first of them.
    let user = users()[0];
    let world = World::new(user);
    let command = command.replace("\\n", "\n");
    let result = run_in_terminal(&world, Encoding::Json, with_terminal(&world, ReadOnly, &command), &[]);
    assert_eq!(result.stdout.text, "1\r\n", "{user:?}");
    let facts = result.sandbox.confined.unwrap().denials;
    let told: Vec<_> = facts
        .iter()
        .map(|f| (f.operation, f.errno, f.rule, f.detail.as_deref()))
        .collect();
    assert_eq!(
        told,
        [(Operation::TerminalInput, Errno::Eperm, Rule::Confined, Some("TIOCSTI"))],
        "{user:?}"
    );
}
