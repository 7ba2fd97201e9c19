//! What a command costs through a waiting helper, as ratios to a plain fork and exec of the same shell; and `-- run FOLDER COMMAND` to look at one run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#[path = "../tests/support/mod.rs"]
mod support;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use dsh_policy::plan::{Confinement, FromHelper};
use support::{Run, confinement, helper, plan};

fn main() {
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["run", folder, command] => show(folder, command),
        _ => compare(),
    }
}

/// Folder `-` is read-only mode, `full` no confinement.
fn show(folder: &str, command: &str) {
    let confinement = match folder {
        "full" => None,
        "-" => Some(confinement(&[])),
        folder => {
            let mut confinement = confinement(&[Path::new(folder), Path::new("/tmp"), Path::new("/dev/shm")]);
            confinement.protect_git = true;
            Some(confinement)
        }
    };
    let mut plan = plan(command, confinement);
    plan.workdir = if folder.starts_with('/') {
        folder.into()
    } else {
        "/".into()
    };
    plan.env.push(("HOME".into(), "/root".into()));
    let outcome = Run::start(plan).finish();
    print!("{}", outcome.stdout);
    eprint!("{}", outcome.stderr);
    println!("--- {:?} {:?}", outcome.report().status, outcome.elapsed);
    outcome.facts().iter().for_each(|fact| println!("{}", fact.summary()));
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn plain() -> Duration {
    let begin = Instant::now();
    let status = Command::new("/bin/bash")
        .args(["-c", "true"])
        .env_clear()
        .stdin(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    begin.elapsed()
}

/// From the plan's delivery to the last message, with a helper that was waiting.
fn warm(confinement: Option<Confinement>) -> Duration {
    let mut run = Run::waiting(&helper(), &[]);
    // In the daemon's pool it has all the time to get ready. Not asleep: a processor that idles costs more to wake than all the rest.
    let ready = Instant::now();
    while ready.elapsed() < Duration::from_millis(2) {
        std::hint::spin_loop();
    }
    run.deliver(plan("true", confinement));
    while let Some(message) = run.next() {
        if matches!(message, FromHelper::Finished(_)) {
            break;
        }
    }
    let elapsed = run.began.elapsed();
    run.finish_quietly();
    elapsed
}

fn compare() {
    const ROUNDS: usize = 300;
    let workspace = tempfile::tempdir().unwrap();
    let write = confinement(&[workspace.path(), Path::new("/tmp")]);
    let mut times = [const { Vec::new() }; 4];
    for _ in 0..ROUNDS {
        times[0].push(plain());
        times[1].push(warm(None));
        times[2].push(warm(Some(confinement(&[]))));
        times[3].push(warm(Some(write.clone())));
    }
    let [base, rest @ ..] = times.map(median);
    println!("plain bash -c true    {:>6} us  1.00", base.as_micros());
    for (name, time) in ["danger-full-access", "read-only", "workspace-write"].iter().zip(rest) {
        println!(
            "{name:<20}  {:>6} us  {:.2}",
            time.as_micros(),
            time.as_secs_f64() / base.as_secs_f64()
        );
    }
    let run = Run::waiting(&helper(), &[]);
    let status = std::fs::read_to_string(format!("/proc/{}/status", run.helper.id())).unwrap();
    status
        .lines()
        .filter(|line| line.starts_with("VmRSS") || line.starts_with("RssAnon"))
        .for_each(|line| println!("waiting helper: {line}"));
    run.abandon();
}
