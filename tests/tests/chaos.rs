//! `kill -9` of clients, daemons, helpers and keepers at random moments: no result is lost or given twice, and nothing is left behind.
//!
//! `DSH_CHAOS_KILLS=1000 cargo test -p dsh-tests --test chaos -- --nocapture` is the long run; `DSH_CHAOS_SEED` repeats one.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use dsh_client::blocking::Client;
use dsh_policy::mode::Lifetime;
use dsh_policy::task::{Cursor, TaskStatus, WaitFor};
use dsh_policy::wire::{ClientMessage, Encoding, ServerMessage};
use dsh_tests::process::{children, command_line, marked, signal, status_field, unique_mark, wait_until};
use dsh_tests::wire::Peer;
use dsh_tests::{World, users};
use rustix::process::Signal;

const SHORT: u64 = 25;

/// A small generator: a seed must mean the same on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % limit as u64).unwrap()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Foreground,
    Session,
    Detached,
}

/// One command: it writes `lines` lines and leaves with `code`.
#[derive(Clone, Copy, Debug)]
struct Job {
    number: usize,
    kind: Kind,
    lines: usize,
    code: i32,
}

impl Job {
    fn output(self) -> String {
        (1..=self.lines)
            .map(|line| format!("{}-{line}\n", self.number))
            .collect()
    }

    fn spawn(self, world: &World, mark: &str) -> Child {
        let Self {
            number, lines, code, ..
        } = self;
        let command = format!(
            "export {mark}; echo $TMPDIR >> tmpdirs; : > $TMPDIR/x; for i in $(seq {lines}); do echo {number}-$i; sleep 0.01; done; exit {code}"
        );
        let socket = world.socket();
        let mut client = world.dsh_exec(&[
            "--socket".as_ref(),
            socket.as_os_str(),
            if self.kind == Kind::Foreground { "run" } else { "start" }.as_ref(),
            "--mode".as_ref(),
            "workspace-write".as_ref(),
        ]);
        if self.kind != Kind::Foreground {
            client.args(["--description", &format!("job {number}")]);
        }
        if self.kind == Kind::Detached {
            client.args(["--lifetime", "detached"]);
        }
        client
            .args(["--", &command])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        client.spawn().unwrap()
    }
}

#[derive(Default)]
struct Tally {
    kills: BTreeMap<&'static str, usize>,
    /// Numbers of detached tasks whose keeper or helper was killed.
    broken: BTreeSet<u64>,
    jobs: Vec<Job>,
    /// Detached tasks that a client was told of: the id, and the job.
    told: BTreeMap<String, usize>,
    foreground_whole: usize,
}

fn is_helper(pid: u32) -> bool {
    command_line(pid).contains("dsh-exec-helper")
}

/// Keepers that live, by task.
fn keepers(world: &World) -> Vec<(u64, u32)> {
    let entries = std::fs::read_dir(world.state().join("detached"))
        .into_iter()
        .flatten()
        .flatten();
    let keeper = |path: &Path| -> Option<(u64, u32)> {
        let number: u64 = path.file_name()?.to_str()?.parse().ok()?;
        let pid = std::fs::read_to_string(path.join("keeper")).ok()?.parse().ok()?;
        command_line(pid)
            .ends_with(&format!("--keep {} ", path.display()))
            .then_some((number, pid))
    };
    entries.filter_map(|entry| keeper(&entry.path())).collect()
}

/// Kills one process of the chosen kind, when there is one.
fn strike(world: &World, random: &mut Random, clients: &[(Job, Child)], tally: &mut Tally) -> bool {
    let keepers = keepers(world);
    let (what, pid, task) = match random.below(4) {
        0 => ("client", clients[random.below(clients.len())].1.id(), None),
        1 => ("daemon", world.daemon_pid(), None),
        2 => {
            let of = |parent: u32, task: Option<u64>| {
                let helpers = children(parent).into_iter().filter(|pid| is_helper(*pid));
                helpers.map(move |pid| (pid, task)).collect::<Vec<_>>()
            };
            let mut helpers = of(world.daemon_pid(), None);
            helpers.extend(keepers.iter().flat_map(|(number, pid)| of(*pid, Some(*number))));
            if helpers.is_empty() {
                return false;
            }
            let (pid, task) = helpers[random.below(helpers.len())];
            ("helper", pid, task)
        }
        _ => {
            if keepers.is_empty() {
                return false;
            }
            let (number, pid) = keepers[random.below(keepers.len())];
            ("keeper", pid, Some(number))
        }
    };
    signal(pid, Signal::KILL);
    tally.broken.extend(task);
    *tally.kills.entry(what).or_default() += 1;
    what == "daemon"
}

fn round(world: &mut World, random: &mut Random, mark: &str, tally: &mut Tally) {
    let mut clients = Vec::new();
    for _ in 0..=random.below(4) {
        let kind = [Kind::Foreground, Kind::Session, Kind::Detached][random.below(3)];
        let job = Job {
            number: tally.jobs.len(),
            kind,
            lines: random.below(12),
            code: i32::try_from(random.below(100)).unwrap(),
        };
        tally.jobs.push(job);
        clients.push((job, job.spawn(world, mark)));
    }
    // The moment is random; nothing waits for it.
    std::thread::sleep(Duration::from_micros(random.below(60_000) as u64));
    if strike(world, random, &clients, tally) {
        let _ = world.wait_for_daemon();
        world.start_daemon();
    }
    for (job, client) in clients {
        let output = client.wait_with_output().unwrap();
        let (stdout, stderr) = (
            String::from_utf8(output.stdout).unwrap(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        );
        match (job.kind, output.status.code()) {
            (_, None | Some(125)) => assert!(
                job.kind != Kind::Foreground || job.output().starts_with(&stdout),
                "{job:?}: {stdout:?}"
            ),
            (Kind::Foreground, Some(code)) => {
                assert_eq!((code, stdout), (job.code, job.output()), "{job:?}: {stderr}");
                tally.foreground_whole += 1;
            }
            (Kind::Session, Some(code)) => assert_eq!((code, stderr.as_str()), (0, ""), "{job:?}"),
            (Kind::Detached, Some(code)) => {
                assert_eq!((code, stderr.as_str()), (0, ""), "{job:?}");
                let earlier = tally.told.insert(stdout.trim().to_owned(), job.number);
                assert_eq!(earlier, None, "an id was given twice: {stdout}");
            }
        }
    }
}

/// Every detached task has ended with exactly its output and outcome, unless its own keeper or helper was killed.
fn check_detached(world: &World, tally: &Tally) -> (usize, usize) {
    let mut client = Client::connect(&world.socket()).unwrap();
    let tasks = client.tasks(None).unwrap();
    let (mut whole, mut failed, mut seen) = (0, 0, BTreeSet::new());
    for task in tasks.iter().filter(|task| task.lifetime == Lifetime::Detached) {
        let number: usize = task.label.strip_prefix("job ").unwrap().parse().unwrap();
        let job = tally.jobs[number];
        assert!(seen.insert(number), "{job:?} ran twice");
        let from = Some(Cursor::default());
        let end = client
            .task_output(None, &task.task, from, WaitFor::End, Some(60_000))
            .unwrap();
        let stdout = String::from_utf8(end.stdout.0).unwrap();
        let id: u64 = task.task.strip_prefix("bash-").unwrap().parse().unwrap();
        match end.info.status {
            TaskStatus::Completed { exit_code } => {
                assert_eq!((exit_code, stdout), (job.code, job.output()), "{job:?}");
                assert_eq!(end.result.unwrap().survivors, 0);
                whole += 1;
            }
            TaskStatus::Failed { reason } => {
                assert!(tally.broken.contains(&id), "{job:?} {id}: {reason}\n{}", world.log());
                assert!(job.output().starts_with(&stdout), "{job:?}: {stdout:?}");
                failed += 1;
            }
            other => panic!("{job:?}: {other:?}"),
        }
    }
    for (id, number) in &tally.told {
        assert!(seen.contains(number), "{id} is lost: {:?}", tally.jobs[*number]);
    }
    (whole, failed)
}

/// The notices that come at once, by task.
fn notices(world: &World) -> Vec<String> {
    let mut listener = Peer::hello(&world.socket(), Encoding::Json);
    listener.send(&ClientMessage::Notices { id: 1, session: None });
    listener.send(&ClientMessage::Status { id: 2 });
    let mut told = Vec::new();
    loop {
        match listener.message().unwrap() {
            ServerMessage::Notice { task, .. } if task.lifetime == Lifetime::Detached => told.push(task.task),
            ServerMessage::Notice { .. } => {}
            ServerMessage::Status { .. } => return told,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn nothing_is_lost_twice_or_left_whoever_is_killed() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let wanted = number("DSH_CHAOS_KILLS").unwrap_or(SHORT);
    let nanos = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_nanos();
    let seed = number("DSH_CHAOS_SEED").unwrap_or(u64::try_from(nanos & 0xffff_ffff).unwrap() | 1);
    println!("DSH_CHAOS_SEED={seed} DSH_CHAOS_KILLS={wanted}");
    let config = "killGraceMs = 300\nkeptTasks = 100000\nmaxTasks = 1000\n";
    let mut world = World::with_config(users()[0], config);
    let (mark, mut random, mut tally) = (unique_mark("chaos"), Random(seed), Tally::default());
    while tally.kills.values().sum::<usize>() < usize::try_from(wanted).unwrap() {
        round(&mut world, &mut random, &mark, &mut tally);
    }
    // Everything that still runs comes to its end, and every end is told once.
    let mut client = Client::connect(&world.socket()).unwrap();
    let running = |client: &mut Client| {
        client
            .tasks(None)
            .unwrap()
            .iter()
            .any(|task| !task.status.is_terminal())
    };
    assert!(wait_until(Duration::from_secs(60), || !running(&mut client)));
    let mut told = notices(&world);
    assert_eq!(notices(&world), Vec::<String>::new(), "told already");
    world.signal_daemon(Signal::KILL);
    let _ = world.wait_for_daemon();
    world.start_daemon();
    assert_eq!(
        notices(&world),
        Vec::<String>::new(),
        "told already, by an earlier daemon"
    );
    let (whole, failed) = check_detached(&world, &tally);
    told.sort();
    told.dedup();
    assert_eq!(told.len(), whole + failed);
    // Nothing is left: no process, no temporary folder, no descriptor, no half of a file.
    assert!(
        wait_until(Duration::from_secs(10), || marked(&mark).is_empty()
            && keepers(&world).is_empty()),
        "{:?} {:?}",
        marked(&mark),
        keepers(&world)
    );
    let strangers = || {
        let is_stranger =
            |pid: &u32| !is_helper(*pid) || status_field(*pid, "State:").is_none_or(|state| state.starts_with('Z'));
        children(world.daemon_pid()).into_iter().filter(is_stranger).count()
    };
    assert!(wait_until(Duration::from_secs(5), || strangers() == 0));
    let tmpdirs = std::fs::read_to_string(world.workspace().join("tmpdirs")).unwrap_or_default();
    let left: Vec<&str> = tmpdirs.lines().filter(|path| Path::new(path).exists()).collect();
    assert_eq!(left, Vec::<&str>::new());
    let names = |folder: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
    };
    let records = || {
        names(&world.state())
            .iter()
            .filter(|name| name.starts_with("tmpdirs-"))
            .count()
    };
    assert_eq!(records(), 1, "{:?}", names(&world.state()));
    assert_eq!(names(&world.state().join("spill")), Vec::<String>::new());
    let detached = world.state().join("detached");
    assert_eq!(names(&detached).len(), whole + failed);
    for task in names(&detached) {
        let files = names(&detached.join(&task));
        assert!(
            !files
                .iter()
                .any(|name| name.ends_with(".part") || name.ends_with(".new")),
            "{files:?}"
        );
    }
    // Each task that is known has one open file; what else is open does not grow with kills.
    let open = names(&Path::new("/proc").join(world.daemon_pid().to_string()).join("fd")).len();
    assert!(open < whole + failed + 40, "{open}");
    println!(
        "{} jobs, kills {:?}, foreground whole {}, detached whole {whole}, detached lost with their keeper or helper {failed}",
        tally.jobs.len(),
        tally.kills,
        tally.foreground_whole
    );
}
