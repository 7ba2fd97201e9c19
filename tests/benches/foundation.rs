//! What one command costs, as ratios to a plain fork and exec of `bash -c true` measured in the same rounds; commands per second; memory.
//!
//! `cargo bench -p dsh-tests`. Rounds are interleaved and medians are shown, because absolute times of one machine say nothing about another.
//! `DSH_BENCH_REQUESTS` sets the length of the memory run (100 000 by default).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use dsh_policy::wire::{ClientMessage, Encoding, ServerMessage};
use dsh_policy::{BashExecRequest, PolicyRequest, SandboxMode};
use dsh_tests::process::{children, command_line, status_field};
use dsh_tests::wire::Peer;
use dsh_tests::{World, users};

const ROUNDS: usize = 200;
const WARM_UP: usize = 20;

fn main() {
    // The measuring process is the world's user, or the daemon would not serve it.
    measure(&World::new(users()[0]));
}

fn measure(world: &World) {
    println!(
        "kernel {}, {} processors, user {}",
        release(),
        processors(),
        world.user.id()
    );
    latency(world);
    throughput(world);
    memory(world);
    cold_start(world);
}

fn release() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .unwrap_or_default()
        .trim()
        .to_owned()
}
fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

fn request(world: &World, mode: SandboxMode, command: &str) -> BashExecRequest {
    let workspace_root = Some(world.workspace().into());
    BashExecRequest {
        command: command.into(),
        sandbox_policy: Some(PolicyRequest {
            mode: Some(mode),
            workspace_root,
            ..PolicyRequest::default()
        }),
        ambient_env: Some([("PATH".into(), "/usr/bin:/bin".into())].into()),
        ..BashExecRequest::default()
    }
}

fn one(peer: &mut Peer, id: u64, request: &BashExecRequest) {
    peer.send(&ClientMessage::Run {
        id,
        request: Box::new(request.clone()),
        stream: false,
    });
    match peer.last_answer(id) {
        ServerMessage::Finished { result, .. } => assert_eq!(result.exit_code, Some(0), "{result:?}"),
        other => panic!("{other:?}"),
    }
}

fn plain() {
    let status = Command::new("/bin/bash")
        .args(["-c", "true"])
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status();
    assert!(status.unwrap().success());
}

fn timed(work: impl FnOnce()) -> Duration {
    let begun = Instant::now();
    work();
    begun.elapsed()
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// A row: name, median, ratio to the first row, spread of the middle half.
fn print_rows(title: &str, rows: &mut [(String, Vec<Duration>)]) {
    println!("\n{title:<44} {:>10} {:>8} {:>19}", "median", "ratio", "middle half");
    let base = median(&mut rows[0].1);
    for (name, times) in rows {
        let middle = median(times);
        let (low, high) = (times[times.len() / 4], times[times.len() * 3 / 4]);
        let ratio = middle.as_secs_f64() / base.as_secs_f64();
        println!(
            "{name:<44} {:>7.3} ms {ratio:>7.2}x {:>7.3} - {:>6.3} ms",
            ms(middle),
            ms(low),
            ms(high)
        );
    }
}
fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// One warm request after another on one connection, and through the command line.
fn latency(world: &World) {
    let mut peer = Peer::hello(&world.socket(), Encoding::Bincode);
    let mut rows = vec![("plain fork + exec of bash -c true".to_owned(), Vec::new())];
    rows.extend(
        SandboxMode::ALL
            .iter()
            .map(|mode| (format!("warm request, {mode}"), Vec::new())),
    );
    rows.push(("dsh-exec run, warm daemon, read-only".to_owned(), Vec::new()));
    for round in 0..WARM_UP + ROUNDS {
        let mut times = vec![timed(plain)];
        for mode in SandboxMode::ALL {
            let request = request(world, *mode, "true");
            times.push(timed(|| one(&mut peer, 1, &request)));
        }
        times.push(timed(|| assert_eq!(world.run(SandboxMode::ReadOnly, "true").code(), 0)));
        if round >= WARM_UP {
            for (row, time) in rows.iter_mut().zip(times) {
                row.1.push(time);
            }
        }
    }
    print_rows("one command at a time", &mut rows);
}

/// Commands per second with several in flight on one connection.
fn throughput(world: &World) {
    println!(
        "\n{:<44} {:>10} {:>8}",
        "commands in flight (workspace-write)", "per second", "ratio"
    );
    let mut base = None;
    for in_flight in [1u64, 2, 8, 64] {
        let mut peer = Peer::hello(&world.socket(), Encoding::Bincode);
        let request = request(world, SandboxMode::WorkspaceWrite, "true");
        let total = 600;
        let (mut sent, mut done) = (0, 0);
        let time = timed(|| {
            while done < total {
                while sent < total && sent - done < in_flight {
                    peer.send(&ClientMessage::Run {
                        id: sent,
                        request: Box::new(request.clone()),
                        stream: false,
                    });
                    sent += 1;
                }
                match peer.message().expect("the daemon lives") {
                    ServerMessage::Finished { .. } => done += 1,
                    ServerMessage::Error { error, .. } => panic!("{error}"),
                    _ => {}
                }
            }
        });
        let rate = total as f64 / time.as_secs_f64();
        let base = *base.get_or_insert(rate);
        println!("{in_flight:<44} {rate:>10.0} {:>7.2}x", rate / base);
    }
}

/// The first command of a user: the client finds no daemon, starts one, and it serves.
fn cold_start(world: &World) {
    let mut rows = vec![
        ("plain fork + exec of bash -c true".to_owned(), Vec::new()),
        ("first command, daemon included".to_owned(), Vec::new()),
    ];
    for _ in 0..20 {
        rows[0].1.push(timed(plain));
        let cold = World::without_daemon(world.user, "idleExitMs = 50\n");
        let mut command = cold.dsh_exec(&["run".as_ref(), "--".as_ref(), "true".as_ref()]);
        rows[1].1.push(timed(|| assert!(command.status().unwrap().success())));
        let gone = dsh_tests::process::wait_until(Duration::from_secs(5), || !cold.socket().exists());
        assert!(gone, "the daemon leaves when idle");
    }
    print_rows("cold", &mut rows);
}

fn resident(pid: u32) -> u64 {
    status_field(pid, "VmRSS:")
        .and_then(|text| text.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

fn helpers(world: &World) -> Vec<u32> {
    children(world.daemon_pid())
        .into_iter()
        .filter(|pid| command_line(*pid).contains("dsh-exec-helper"))
        .collect()
}

/// Resident memory: idle, with 64 commands, after many requests.
fn memory(world: &World) {
    let fresh = World::new(world.user);
    let mut peer = Peer::hello(&fresh.socket(), Encoding::Bincode);
    let (sleep, quick) = (
        request(&fresh, SandboxMode::WorkspaceWrite, "sleep 1"),
        request(&fresh, SandboxMode::WorkspaceWrite, "true"),
    );
    one(&mut peer, 0, &quick);
    println!("\n{:<44} {:>10}", "resident memory", "KiB");
    println!("{:<44} {:>10}", "daemon, idle", resident(fresh.daemon_pid()));
    for id in 0..64 {
        peer.send(&ClientMessage::Run {
            id,
            request: Box::new(sleep.clone()),
            stream: false,
        });
    }
    std::thread::sleep(Duration::from_millis(700));
    println!("{:<44} {:>10}", "daemon, 64 commands", resident(fresh.daemon_pid()));
    let mut sizes: Vec<u64> = helpers(&fresh).into_iter().map(resident).collect();
    sizes.sort_unstable();
    println!(
        "{:<44} {:>10}",
        "helper, median of those",
        sizes.get(sizes.len() / 2).copied().unwrap_or(0)
    );
    for _ in 0..64 {
        while !matches!(peer.message(), Some(ServerMessage::Finished { .. })) {}
    }
    let total: u64 = std::env::var("DSH_BENCH_REQUESTS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(100_000);
    let (mut sent, mut done) = (0, 0);
    while done < total {
        while sent < total && sent - done < 8 {
            peer.send(&ClientMessage::Run {
                id: sent,
                request: Box::new(quick.clone()),
                stream: false,
            });
            sent += 1;
        }
        if matches!(
            peer.message().expect("the daemon lives"),
            ServerMessage::Finished { .. }
        ) {
            done += 1;
            if done == total / 10 {
                println!(
                    "{:<44} {:>10}",
                    format!("daemon, after {done} requests"),
                    resident(fresh.daemon_pid())
                );
                let _ = std::io::stdout().flush();
            }
        }
    }
    println!(
        "{:<44} {:>10}",
        format!("daemon, after {total} requests"),
        resident(fresh.daemon_pid())
    );
}
