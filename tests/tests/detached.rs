//! Tasks that outlive their client and the daemon: found again with every byte, their outcome and their facts, and nothing twice.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::path::PathBuf;
use std::time::Duration;

use dsh_client::blocking::Client;
use dsh_policy::mode::Lifetime;
use dsh_policy::task::{Cursor, TaskOutput, TaskStatus, WaitFor};
use dsh_policy::wire::{ClientMessage, Encoding, ServerMessage};
use dsh_policy::{BashExecRequest, PolicyRequest, SandboxMode};
use dsh_tests::process::{command_line, marked, status_field, unique_mark, wait_until};
use dsh_tests::wire::Peer;
use dsh_tests::{User, World, process, users};
use rustix::process::Signal;

const SOON: Duration = Duration::from_secs(10);

fn world(user: User, config: &str) -> World {
    World::with_config(user, &format!("killGraceMs = 300\n{config}"))
}

fn connect(world: &World) -> Client {
    Client::connect(&world.socket()).unwrap()
}

fn request(world: &World, session: Option<&str>, command: &str) -> BashExecRequest {
    BashExecRequest {
        command: command.into(),
        session: session.map(str::to_owned),
        lifetime: Some(Lifetime::Detached),
        sandbox_policy: Some(PolicyRequest {
            mode: Some(SandboxMode::WorkspaceWrite),
            workspace_root: Some(world.workspace().into()),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn start(world: &World, session: Option<&str>, command: &str) -> String {
    let task = connect(world).start(request(world, session, command)).unwrap();
    assert_eq!(task.lifetime, Lifetime::Detached);
    task.task
}

fn read(world: &World, session: Option<&str>, task: &str, wait: WaitFor) -> TaskOutput {
    connect(world)
        .task_output(session, task, None, wait, Some(10_000))
        .unwrap()
}

fn whole(world: &World, session: Option<&str>, task: &str) -> TaskOutput {
    let from = Some(Cursor::default());
    connect(world)
        .task_output(session, task, from, WaitFor::End, Some(10_000))
        .unwrap()
}

fn restart(world: &mut World, signal: Signal) {
    world.signal_daemon(signal);
    let _ = world.wait_for_daemon();
    world.start_daemon();
}

fn folder(world: &World, number: u32) -> PathBuf {
    world.state().join(format!("detached/{number}"))
}

/// A command that goes on when the test says so, whoever lives then.
fn gate(world: &World) -> PathBuf {
    let gate = world.workspace().join("gate");
    rustix::fs::mknodat(rustix::fs::CWD, &gate, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    world.user.own(&gate);
    gate
}

fn keeper(world: &World, number: u32) -> u32 {
    let pid = std::fs::read_to_string(folder(world, number).join("keeper")).unwrap();
    pid.parse().unwrap()
}

#[test]
fn it_is_found_again_with_every_byte_its_outcome_and_its_facts() {
    for signal in [Signal::TERM, Signal::KILL] {
        let mut world = world(users()[0], "");
        let gate = gate(&world);
        let refused = world.outside().join("refused");
        let command = format!(
            "echo one; touch {}; read < gate; echo two >&2; exit 4",
            refused.display()
        );
        let task = start(&world, Some("s1"), &command);
        assert_eq!(task, "bash-1");
        let first = read(&world, Some("s1"), &task, WaitFor::Output);
        assert_eq!(first.stdout.0, b"one\n", "{signal:?}");
        restart(&mut world, signal);
        // Its number is taken, and strangers know as little of it as before.
        let mut client = connect(&world);
        let other = client.start(BashExecRequest {
            lifetime: None,
            ..request(&world, None, "true")
        });
        assert_eq!(other.unwrap().task, "bash-2");
        let stranger = client.task_output(Some("s2"), &task, None, WaitFor::Nothing, None);
        assert_eq!(stranger.unwrap_err().to_string(), "unknown task bash-1");
        let found = client.tasks(Some("s1")).unwrap();
        assert_eq!(
            (found[0].label.as_str(), &found[0].status, found[0].lifetime),
            (&*dsh_label(&command), &TaskStatus::Running, Lifetime::Detached)
        );
        std::fs::write(&gate, "go\n").unwrap();
        let last = read(&world, Some("s1"), &task, WaitFor::End);
        // What the first daemon gave is not given again.
        assert!(!last.stdout.0.starts_with(b"one"), "{signal:?}");
        assert!(last.stderr.0.ends_with(b"two\n"), "{:?}", last.stderr);
        assert_eq!(last.info.status, TaskStatus::Completed { exit_code: 4 });
        let result = last.result.unwrap();
        assert_eq!((result.survivors, result.stdout.text.as_str()), (0, "one\n"));
        let facts = result.sandbox.confined.as_ref().unwrap().denials.clone();
        assert_eq!(facts.len(), 1);
        assert_eq!(facts[0].path.as_ref().unwrap().to_path_buf(), refused);
        // And once more, when everything has ended: nothing new, and the whole for those who ask for it.
        restart(&mut world, signal);
        let again = read(&world, Some("s1"), &task, WaitFor::End);
        assert_eq!((again.stdout.0.len(), again.stderr.0.len()), (0, 0));
        assert_eq!(*again.result.unwrap(), *result);
        let all = whole(&world, Some("s1"), &task);
        assert_eq!((all.stdout.0.as_slice(), all.lossy), (&b"one\n"[..], false));
    }
}

fn dsh_label(command: &str) -> String {
    let mut label: String = command.chars().take(80).collect();
    if label.len() < command.len() {
        label.push('…');
    }
    label
}

#[test]
fn what_ends_while_no_daemon_lives_is_told_once() {
    let mut world = world(users()[0], "");
    let gate = gate(&world);
    let task = start(
        &world,
        Some("s1"),
        "read < gate; head -c 3000000 /dev/zero | tr '\\0' x; printf END; kill -9 $$",
    );
    world.signal_daemon(Signal::KILL);
    let _ = world.wait_for_daemon();
    let keeper = keeper(&world, 1);
    std::fs::write(&gate, "go\n").unwrap();
    assert!(
        wait_until(SOON, || command_line(keeper).is_empty()),
        "a keeper leaves with its task"
    );
    world.start_daemon();
    let notices = ClientMessage::Notices {
        id: 7,
        session: Some("s1".into()),
    };
    let mut listener = Peer::hello(&world.socket(), Encoding::Json);
    listener.send(&notices);
    let killed = TaskStatus::Killed {
        signal: Some("SIGKILL".into()),
    };
    match listener.message().unwrap() {
        ServerMessage::Notice { id: 7, task: told } => assert_eq!((told.task, told.status), (task.clone(), killed)),
        other => panic!("{other:?}"),
    }
    restart(&mut world, Signal::KILL);
    let mut listener = Peer::hello(&world.socket(), Encoding::Json);
    listener.send(&notices);
    listener.send(&ClientMessage::Status { id: 8 });
    assert!(
        matches!(listener.message().unwrap(), ServerMessage::Status { id: 8, .. }),
        "told already"
    );
    let end = read(&world, Some("s1"), &task, WaitFor::End);
    assert!(end.lossy && end.stdout.0.ends_with(b"END"));
    assert_eq!(
        (end.next.stdout, end.result.unwrap().stdout.bytes),
        (3_000_003, 3_000_003)
    );
    let [path] = end.spill_paths.as_slice() else {
        panic!("{:?}", end.spill_paths)
    };
    assert_eq!(std::fs::metadata(path.to_path_buf()).unwrap().len(), 3_000_003);
    assert!(path.to_path_buf().starts_with(folder(&world, 1)));
}

#[test]
fn a_keeper_that_dies_leaves_a_record_the_output_and_nothing_else() {
    for with_daemon in [true, false] {
        let mut world = world(users()[0], "");
        let mark = unique_mark("kept");
        let command = format!("export {mark}; echo out; echo err >&2; setsid sleep 1000 & sleep 1000");
        let task = start(&world, None, &command);
        // Either stream may come first.
        let written = || {
            let from = Some(Cursor::default());
            let all = connect(&world).task_output(None, &task, from, WaitFor::Nothing, None);
            let all = all.unwrap();
            (all.stdout.0.as_slice(), all.stderr.0.as_slice()) == (b"out\n", b"err\n")
        };
        assert!(wait_until(SOON, || marked(&mark).len() >= 2 && written()));
        if !with_daemon {
            world.signal_daemon(Signal::KILL);
            let _ = world.wait_for_daemon();
        }
        process::signal(keeper(&world, 1), Signal::KILL);
        assert!(wait_until(SOON, || marked(&mark).is_empty()), "{:?}", marked(&mark));
        if !with_daemon {
            world.start_daemon();
        }
        for round in 0..2 {
            let ended = read(&world, None, &task, WaitFor::End);
            match ended.info.status {
                TaskStatus::Failed { reason } => {
                    assert!(reason.contains("its keeper ended before it reported"), "{reason}");
                }
                other => panic!("{other:?}"),
            }
            assert_eq!(ended.result, None);
            let all = whole(&world, None, &task);
            assert_eq!(
                (all.stdout.0.as_slice(), all.stderr.0.as_slice()),
                (&b"out\n"[..], &b"err\n"[..]),
                "{with_daemon} {round}"
            );
            assert_eq!(all.spill_paths.len(), 2);
            restart(&mut world, Signal::KILL);
        }
        // The probe of a daemon that has just started may be among its children for a moment.
        let only_helpers = || {
            process::children(world.daemon_pid()).into_iter().all(|pid| {
                status_field(pid, "State:").is_some_and(|state| !state.starts_with('Z'))
                    && command_line(pid).contains("helper")
            })
        };
        assert!(wait_until(SOON, only_helpers));
    }
}

#[test]
fn it_ends_when_it_is_told_to_and_not_with_its_session() {
    let mut world = world(users()[0], "keptTasks = 1\n");
    let mark = unique_mark("kept");
    let command = format!("export {mark}; trap '' TERM; echo up; setsid sleep 1000 & sleep 1000");
    let task = start(&world, Some("s1"), &command);
    read(&world, Some("s1"), &task, WaitFor::Output);
    assert_eq!(connect(&world).end_session("s1").unwrap(), 0);
    assert!(wait_until(SOON, || !marked(&mark).is_empty()));
    restart(&mut world, Signal::KILL);
    let before = connect(&world).kill_task(Some("s1"), &task, None).unwrap();
    assert_eq!(before.status, TaskStatus::Running);
    let ended = read(&world, Some("s1"), &task, WaitFor::End);
    let killed = TaskStatus::Killed {
        signal: Some("SIGKILL".into()),
    };
    assert_eq!(ended.info.status, killed);
    assert_eq!(marked(&mark), vec![]);
    assert_eq!(
        connect(&world).kill_task(Some("s1"), &task, None).unwrap().status,
        killed
    );
    // Forgotten ones leave no file.
    for _ in 0..2 {
        let next = start(&world, None, "true");
        read(&world, None, &next, WaitFor::End);
    }
    assert!(wait_until(SOON, || !folder(&world, 1).exists()));
    assert!(folder(&world, 3).exists());
}

#[test]
fn what_cannot_be_started_leaves_nothing_behind() {
    let world = world(users()[0], "maxTasks = 1\n");
    let mut client = connect(&world);
    let mut nowhere = request(&world, None, "true");
    nowhere.workdir = Some("/no/such/folder".into());
    let error = client.start(nowhere).unwrap_err();
    assert!(error.to_string().contains("/no/such/folder"), "{error}");
    let task = start(&world, None, "sleep 1000");
    let error = client.start(request(&world, None, "true")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "1 background tasks are running; end one, or raise `maxTasks` in the configuration"
    );
    assert_eq!(std::fs::read_dir(world.state().join("detached")).unwrap().count(), 1);
    client.kill_task(None, &task, None).unwrap();
    read(&world, None, &task, WaitFor::End);
}

#[test]
fn the_command_line_starts_finds_waits_and_kills() {
    for user in users() {
        the_command_line(world(user, ""));
    }
}

fn the_command_line(mut world: World) {
    let exec = |world: &World, arguments: &[&str]| {
        let mut command = world.dsh_exec(&["--socket".as_ref(), world.socket().as_os_str()]);
        let output = command.args(arguments).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let started = exec(
        &world,
        &["start", "--lifetime", "detached", "--", "echo out; sleep 0.5; exit 3"],
    );
    assert_eq!(started, (Some(0), "bash-1\n".into(), String::new()));
    exec(&world, &["start", "--lifetime", "detached", "--", "sleep 1000"]);
    restart(&mut world, Signal::KILL);
    let waited = exec(&world, &["tasks", "wait", "bash-1"]);
    assert_eq!(
        waited,
        (Some(3), "[status: completed, exit code: 3]\n".into(), String::new())
    );
    let followed = exec(&world, &["tasks", "output", "--follow", "bash-1"]);
    assert_eq!(followed, (Some(3), "out\n".into(), String::new()));
    let (_, listed, _) = exec(&world, &["tasks", "list", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(
        (&listed[1]["lifetime"], &listed[1]["status"]["state"]),
        (&"detached".into(), &"running".into())
    );
    exec(&world, &["tasks", "kill", "bash-2"]);
    let waited = exec(&world, &["tasks", "wait", "bash-2"]);
    assert_eq!(
        (waited.0, waited.1.as_str()),
        (Some(143), "[status: killed, signal: SIGTERM]\n")
    );
}
