//! Commands in the background: who may see them, what a read gives, and that nothing of them outlives its session or the daemon.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::ffi::OsStr;
use std::process::Output;
use std::time::{Duration, Instant};

use dsh_client::blocking::Client;
use dsh_policy::task::{Cursor, TaskOutput, TaskStatus, WaitFor};
use dsh_policy::wire::{ClientMessage, Encoding, ServerMessage};
use dsh_policy::{BashExecRequest, PolicyRequest, SandboxMode};
use dsh_tests::process::{marked, unique_mark, wait_until};
use dsh_tests::wire::Peer;
use dsh_tests::{World, users};
use rustix::process::Signal;

fn world(config: &str) -> World {
    World::with_config(users()[0], &format!("killGraceMs = 300\n{config}"))
}

fn connect(world: &World) -> Client {
    Client::connect(&world.socket()).unwrap()
}

fn request(world: &World, session: Option<&str>, command: &str) -> BashExecRequest {
    BashExecRequest {
        command: command.into(),
        session: session.map(str::to_owned),
        sandbox_policy: Some(PolicyRequest {
            mode: Some(SandboxMode::WorkspaceWrite),
            workspace_root: Some(world.workspace().into()),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn start(world: &World, client: &mut Client, session: Option<&str>, command: &str) -> String {
    client.start(request(world, session, command)).unwrap().task
}

fn read(client: &mut Client, session: Option<&str>, task: &str, wait: WaitFor) -> TaskOutput {
    client.task_output(session, task, None, wait, Some(10_000)).unwrap()
}

fn exec(world: &World, arguments: &[&str]) -> Output {
    let mut command = world.dsh_exec(&["--socket".as_ref(), world.socket().as_os_str()]);
    command.args(arguments).current_dir(world.workspace()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_read_gives_what_is_new_and_the_end_is_told() {
    let world = world("");
    let mut client = connect(&world);
    let task = start(
        &world,
        &mut client,
        Some("s1"),
        "echo one; read < fifo; echo two >&2; exit 4",
    );
    assert_eq!(task, "bash-1");
    let fifo = world.workspace().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).ok();
    let first = read(&mut client, Some("s1"), &task, WaitFor::Output);
    assert_eq!(
        (first.stdout.0.as_slice(), &first.info.status),
        (&b"one\n"[..], &TaskStatus::Running)
    );
    let nothing = read(&mut client, Some("s1"), &task, WaitFor::Nothing);
    assert_eq!((nothing.stdout.0.len(), nothing.result), (0, None));
    std::fs::write(&fifo, b"go\n").unwrap();
    let last = read(&mut client, Some("s1"), &task, WaitFor::End);
    assert_eq!(
        (last.stdout.0.as_slice(), last.stderr.0.as_slice()),
        (&b""[..], &b"two\n"[..])
    );
    assert_eq!(last.info.status, TaskStatus::Completed { exit_code: 4 });
    let result = last.result.unwrap();
    assert_eq!(
        (result.exit_code, result.survivors, result.stdout.text.as_str()),
        (Some(4), 0, "one\n")
    );
    // Another reader has a cursor of its own, and output stays readable after the end.
    let whole = client
        .task_output(Some("s1"), &task, Some(Cursor::default()), WaitFor::End, None)
        .unwrap();
    assert_eq!(
        (whole.stdout.0.as_slice(), whole.stderr.0.as_slice()),
        (&b"one\n"[..], &b"two\n"[..])
    );
}

#[test]
fn only_the_owner_sees_a_task_and_one_without_an_owner_is_open() {
    let world = world("");
    let mut client = connect(&world);
    let owned = start(&world, &mut client, Some("s1"), "sleep 1000");
    let open = start(&world, &mut client, None, "echo up; sleep 1000");
    for stranger in [None, Some("s2")] {
        let expected = format!("unknown task {owned}");
        let wait = WaitFor::Nothing;
        let read = client.task_output(stranger, &owned, None, wait, None).unwrap_err();
        let killed = client.kill_task(stranger, &owned, None).unwrap_err();
        assert_eq!((read.to_string(), killed.to_string()), (expected.clone(), expected));
        let seen: Vec<String> = client
            .tasks(stranger)
            .unwrap()
            .into_iter()
            .map(|task| task.task)
            .collect();
        assert_eq!(seen, std::slice::from_ref(&open));
    }
    assert_eq!(client.tasks(Some("s1")).unwrap().len(), 2);
    for name in ["bash-9", "bash-01", "bash", "", "x-1"] {
        let error = client
            .task_output(Some("s1"), name, None, WaitFor::Nothing, None)
            .unwrap_err();
        assert_eq!(error.to_string(), format!("unknown task {name}"));
    }
    read(&mut client, None, &open, WaitFor::Output);
    let before = client.kill_task(Some("s2"), &open, Some("enough")).unwrap();
    assert_eq!(before.status, TaskStatus::Running);
    let ended = read(&mut client, None, &open, WaitFor::End);
    let killed = TaskStatus::Killed {
        signal: Some("SIGTERM".into()),
    };
    assert_eq!(ended.info.status, killed);
    assert_eq!(
        client.kill_task(None, &open, None).unwrap().status,
        killed,
        "a second kill says that it was over"
    );
}

#[test]
fn a_task_outlives_its_client_and_ends_with_its_session() {
    let world = world("");
    let (mark, other) = (unique_mark("task"), unique_mark("other"));
    {
        let mut client = connect(&world);
        let command = format!("export {mark}; trap '' TERM; setsid sleep 1000 & sleep 1000");
        start(&world, &mut client, Some("s1"), &command);
        start(&world, &mut client, Some("s2"), &format!("export {other}; sleep 1000"));
        assert!(wait_until(Duration::from_secs(5), || marked(&mark).len() >= 2
            && !marked(&other).is_empty()));
    }
    std::thread::sleep(Duration::from_millis(300));
    assert!(marked(&mark).len() >= 2, "the client has gone, its task has not");
    let mut client = connect(&world);
    assert_eq!(client.end_session("s1").unwrap(), 1);
    assert_eq!(marked(&mark), vec![], "nothing is left when the session has ended");
    assert!(!marked(&other).is_empty());
    assert_eq!(client.tasks(Some("s1")).unwrap(), []);
    assert_eq!(client.end_session("s1").unwrap(), 0);
}

#[test]
fn the_daemon_takes_its_tasks_with_it_however_it_ends() {
    for signal in [Signal::TERM, Signal::KILL] {
        let mut world = world("");
        let mark = unique_mark("daemon");
        start(
            &world,
            &mut connect(&world),
            Some("s1"),
            &format!("export {mark}; setsid sleep 1000 & sleep 1000"),
        );
        assert!(wait_until(Duration::from_secs(5), || marked(&mark).len() >= 2));
        world.signal_daemon(signal);
        let _ = world.wait_for_daemon();
        assert!(
            wait_until(Duration::from_secs(1), || marked(&mark).is_empty()),
            "{signal:?}"
        );
    }
}

#[test]
fn a_helper_that_dies_is_a_failure_and_no_success() {
    let world = world("");
    let mut client = connect(&world);
    let task = start(&world, &mut client, None, "echo up; sleep 1000");
    read(&mut client, None, &task, WaitFor::Output);
    let is_helper = |pid: u32| dsh_tests::process::command_line(pid).contains("dsh-exec-helper");
    let busy = dsh_tests::process::children(world.daemon_pid())
        .into_iter()
        .find(|pid| {
            dsh_tests::process::children(*pid)
                .into_iter()
                .any(|child| !is_helper(child))
        });
    dsh_tests::process::signal(busy.unwrap(), Signal::KILL);
    let ended = read(&mut client, None, &task, WaitFor::End);
    match ended.info.status {
        TaskStatus::Failed { reason } => assert!(reason.starts_with("the fate of the command is unknown"), "{reason}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(ended.result, None);
}

#[test]
fn much_output_is_bounded_in_memory_and_whole_on_disk() {
    let world = world("");
    let mut client = connect(&world);
    let task = start(
        &world,
        &mut client,
        None,
        "head -c 8000000 /dev/zero | tr '\\0' x; printf END",
    );
    let ended = read(&mut client, None, &task, WaitFor::End);
    assert!(ended.lossy && ended.stdout.0.ends_with(b"END") && ended.stdout.0.len() < 600_000);
    assert_eq!(
        (ended.next.stdout, ended.result.unwrap().stdout.bytes),
        (8_000_003, 8_000_003)
    );
    let [path] = ended.spill_paths.as_slice() else {
        panic!("{:?}", ended.spill_paths)
    };
    assert_eq!(std::fs::metadata(path.to_path_buf()).unwrap().len(), 8_000_003);
}

#[test]
fn a_task_has_no_time_limit_and_its_refusals_are_facts() {
    let world = world("timeoutMs = 300\n");
    let mut client = connect(&world);
    let refused = world.outside().join("refused");
    let mut asked = request(&world, None, &format!("touch {}; sleep 1; exit 3", refused.display()));
    asked.timeout_ms = Some(200);
    let task = client.start(asked).unwrap().task;
    let ended = read(&mut client, None, &task, WaitFor::End);
    assert_eq!(ended.info.status, TaskStatus::Completed { exit_code: 3 });
    let result = ended.result.unwrap();
    assert_eq!((result.timed_out, result.sandbox.denied), (false, Some(true)));
    let facts = result.sandbox.confined.unwrap().denials;
    assert_eq!(facts.len(), 1);
    assert_eq!(facts[0].path.as_ref().unwrap().to_path_buf(), refused);
}

#[test]
fn what_cannot_be_started_leaves_nothing_behind() {
    let world = world("maxTasks = 2\nkeptTasks = 1\n");
    let mut client = connect(&world);
    for _ in 0..2 {
        start(&world, &mut client, None, "sleep 1000");
    }
    let error = client.start(request(&world, None, "true")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "2 background tasks are running; end one, or raise `maxTasks` in the configuration"
    );
    assert_eq!(client.tasks(None).unwrap().len(), 2);
    let mut foreground = request(&world, None, "true");
    foreground.lifetime = Some(dsh_policy::mode::Lifetime::Foreground);
    let error = client.start(foreground).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a background command has the lifetime `session` or `detached`"
    );
    for task in ["bash-1", "bash-2"] {
        client.kill_task(None, task, None).unwrap();
        read(&mut client, None, task, WaitFor::End);
    }
    let mut nowhere = request(&world, None, "true");
    nowhere.workdir = Some("/no/such/folder".into());
    let error = client.start(nowhere).unwrap_err();
    assert!(error.to_string().contains("/no/such/folder"), "{error}");
    assert_eq!(client.tasks(None).unwrap().len(), 2);
    // Of those that have ended one stays.
    let third = start(&world, &mut client, None, "true");
    read(&mut client, None, &third, WaitFor::End);
    start(&world, &mut client, None, "true");
    let names: Vec<String> = client.tasks(None).unwrap().into_iter().map(|task| task.task).collect();
    assert_eq!(names, ["bash-3", "bash-4"]);
}

#[test]
fn an_end_is_told_once_and_not_to_those_who_know() {
    let world = world("");
    let mut listener = Peer::hello(&world.socket(), Encoding::Json);
    let session = Some("s1".to_owned());
    listener.send(&ClientMessage::Notices { id: 7, session });
    let mut client = connect(&world);
    let known = start(&world, &mut client, Some("s1"), "true");
    read(&mut client, Some("s1"), &known, WaitFor::End);
    start(&world, &mut client, Some("s2"), "true");
    let told = start(&world, &mut client, Some("s1"), "sleep 0.3; exit 5");
    match listener.message().unwrap() {
        ServerMessage::Notice { id: 7, task } => {
            assert_eq!((task.task, task.status), (told, TaskStatus::Completed { exit_code: 5 }));
        }
        other => panic!("{other:?}"),
    }
    // The end that a kill asks for is told; a kill of what has ended tells by itself.
    let killed = start(&world, &mut client, Some("s1"), "echo up; sleep 1000");
    read(&mut client, Some("s1"), &killed, WaitFor::Output);
    client.kill_task(Some("s1"), &killed, None).unwrap();
    match listener.message().unwrap() {
        ServerMessage::Notice { task, .. } => assert_eq!(task.task, killed),
        other => panic!("{other:?}"),
    }
    // Nothing else comes before the answer to the next question.
    listener.send(&ClientMessage::Status { id: 8 });
    assert!(matches!(
        listener.message().unwrap(),
        ServerMessage::Status { id: 8, .. }
    ));
}

#[test]
fn many_tasks_at_once_are_all_ended() {
    let world = world("maxTasks = 200\n");
    let mut client = connect(&world);
    let mark = unique_mark("many");
    for n in 0..100 {
        start(
            &world,
            &mut client,
            Some("s1"),
            &format!("export {mark}; echo {n}; sleep 1000"),
        );
    }
    assert!(wait_until(Duration::from_secs(30), || marked(&mark).len() >= 100));
    let begun = Instant::now();
    assert_eq!(client.end_session("s1").unwrap(), 100);
    assert_eq!(marked(&mark), vec![]);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[test]
fn the_command_line_starts_lists_reads_waits_and_kills() {
    let world = world("");
    let started = exec(
        &world,
        &[
            "start",
            "--mode",
            "workspace-write",
            "--",
            "echo out; echo err >&2; sleep 0.2; exit 3",
        ],
    );
    assert_eq!(
        (text(&started.stdout), text(&started.stderr)),
        ("bash-1\n".into(), String::new())
    );
    let waited = exec(&world, &["tasks", "wait", "bash-1"]);
    assert_eq!(
        (waited.status.code(), text(&waited.stdout)),
        (Some(3), "[status: completed, exit code: 3]\n".into())
    );
    let followed = exec(&world, &["tasks", "output", "--follow", "bash-1"]);
    assert_eq!(followed.status.code(), Some(3));
    assert_eq!(
        (text(&followed.stdout), text(&followed.stderr)),
        ("out\n".into(), "err\n".into())
    );
    exec(&world, &["start", "--description", "waits long", "--", "sleep 1000"]);
    let listed = exec(&world, &["tasks", "list"]);
    assert_eq!(
        text(&listed.stdout),
        "bash-1 [bash] completed, exit code: 3 — echo out; echo err >&2; sleep 0.2; exit 3\nbash-2 [bash] running — waits long\n"
    );
    let late = exec(&world, &["tasks", "wait", "bash-2", "--timeout-ms", "100"]);
    assert_eq!(
        (late.status.code(), text(&late.stdout)),
        (Some(124), "[status: running]\n".into())
    );
    let killed = exec(&world, &["tasks", "kill", "bash-2"]);
    assert_eq!(text(&killed.stdout), "requested cancellation of task bash-2\n");
    let waited = exec(&world, &["tasks", "wait", "bash-2"]);
    assert_eq!(
        (waited.status.code(), text(&waited.stdout)),
        (Some(143), "[status: killed, signal: SIGTERM]\n".into())
    );
    let again = exec(&world, &["tasks", "kill", "bash-2"]);
    assert_eq!(
        text(&again.stdout),
        "task bash-2 had already finished [status: killed, signal: SIGTERM]\n"
    );
    let unknown = exec(&world, &["tasks", "output", "bash-7"]);
    assert_eq!(
        (unknown.status.code(), text(&unknown.stderr)),
        (Some(125), "dsh-exec: unknown task bash-7\n".into())
    );
    let json: serde_json::Value = serde_json::from_slice(&exec(&world, &["tasks", "list", "--json"]).stdout).unwrap();
    assert_eq!(
        json[0]["status"],
        serde_json::json!({"state": "completed", "exitCode": 3})
    );
    let wrong = exec(&world, &["start", "--timeout-ms", "5", "--", "true"]);
    assert_eq!(wrong.status.code(), Some(125));
    let none = exec(&world, &["tasks", "--session", "s9", "end-session", "s9"]);
    assert_eq!(text(&none.stdout), "session s9 ended with 0 tasks\n");
}

#[test]
fn output_is_seen_soon_after_it_was_written() {
    let world = world("");
    let mut client = connect(&world);
    let task = start(&world, &mut client, None, "sleep 0.2; date +%s%N; sleep 1000");
    let seen = read(&mut client, None, &task, WaitFor::Output);
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    let written: u64 = text(&seen.stdout.0).trim().parse().unwrap();
    // Far above the 20 ms that an idle machine needs, and far below any interval of asking again.
    assert!(now < Duration::from_nanos(written) + Duration::from_millis(500));
}

#[test]
fn a_daemon_that_runs_a_task_is_not_idle() {
    let world = World::without_daemon(users()[0], "idleExitMs = 200\n");
    let run = |arguments: &[&str]| {
        let arguments: Vec<&OsStr> = arguments.iter().map(OsStr::new).collect();
        world.dsh_exec(&arguments).output().unwrap()
    };
    assert_eq!(text(&run(&["start", "--", "sleep 1.5"]).stdout), "bash-1\n");
    std::thread::sleep(Duration::from_millis(800));
    assert!(world.socket().exists());
    assert!(text(&run(&["tasks", "list"]).stdout).starts_with("bash-1 [bash] running"));
    assert!(wait_until(Duration::from_secs(5), || !world.socket().exists()));
}

#[test]
fn questions_without_an_end_are_bounded_and_end_with_their_client() {
    let world = world("");
    start(&world, &mut connect(&world), None, "sleep 1000");
    let mut peer = Peer::hello(&world.socket(), Encoding::Json);
    for id in 0..1_030 {
        peer.send(&ClientMessage::TaskRead {
            id,
            session: None,
            task: "bash-1".into(),
            cursor: Some(Cursor::default()),
            wait: WaitFor::End,
            timeout_ms: Some(600_000),
        });
    }
    match peer.message().unwrap() {
        ServerMessage::Error { id: Some(1_024), error } => {
            assert!(error.message.starts_with("1024 questions"), "{error}")
        }
        other => panic!("{other:?}"),
    }
    drop(peer);
    let mut client = connect(&world);
    let gone = || client.status().unwrap().connections == 1;
    assert!(
        wait_until(Duration::from_secs(5), gone),
        "a client that has left is not waited with"
    );
}

#[test]
fn what_ended_tasks_have_written_takes_little_memory_and_no_file_stays() {
    let mut world = world("");
    let mut client = connect(&world);
    for _ in 0..60 {
        let task = start(&world, &mut client, None, "head -c 2000000 /dev/zero | tee /dev/stderr");
        client
            .task_output(None, &task, Some(Cursor::default()), WaitFor::End, None)
            .unwrap();
    }
    let memory = dsh_tests::process::status_field(world.daemon_pid(), "VmRSS:").unwrap();
    let kib: u64 = memory.split_whitespace().next().unwrap().parse().unwrap();
    assert!(kib < 48 * 1024, "{memory}");
    let oldest = client
        .task_output(None, "bash-1", Some(Cursor::default()), WaitFor::Nothing, None)
        .unwrap();
    assert!(oldest.lossy && oldest.stdout.0.is_empty() && oldest.next.stdout == 2_000_000);
    let spilled = || std::fs::read_dir(world.state().join("spill")).unwrap().count();
    assert!(spilled() >= 120);
    world.signal_daemon(Signal::TERM);
    drop(client);
    let folder = world.state().join("spill");
    let _ = world.wait_for_daemon();
    assert_eq!(
        std::fs::read_dir(folder).unwrap().count(),
        0,
        "nobody can ask for them any more"
    );
}
