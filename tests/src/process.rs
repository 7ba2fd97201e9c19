//! Processes of this machine: finding them by a mark in their environment, signalling them by id.
use std::fs;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Sends `signal` to exactly one process; one that has gone is fine.
pub fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// Every process that has `mark` in its environment and is not a zombie, with its command line.
#[must_use]
pub fn marked(mark: &str) -> Vec<(u32, String)> {
    all()
        .filter(|pid| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment
                .split(|byte| *byte == 0)
                .any(|entry| entry == mark.as_bytes())
        })
        .map(|pid| (pid, command_line(pid)))
        .collect()
}

/// Every process id of this machine.
pub fn all() -> impl Iterator<Item = u32> {
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Children of a process, zombies too.
#[must_use]
pub fn children(parent: u32) -> Vec<u32> {
    all()
        .filter(|pid| status_field(*pid, "PPid:").and_then(|text| text.parse().ok()) == Some(parent))
        .collect()
}

/// One field of `/proc/PID/status`.
#[must_use]
pub fn status_field(pid: u32, field: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status
        .lines()
        .find_map(|line| line.strip_prefix(field))
        .map(|rest| rest.trim().to_owned())
}

/// A process's arguments, for messages and for finding a program by name.
#[must_use]
pub fn command_line(pid: u32) -> String {
    String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default()).replace('\0', " ")
}

/// Waits until `condition` holds; says whether it did in time.
pub fn wait_until(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A word that no other test uses, as an environment entry.
#[must_use]
pub fn unique_mark(name: &str) -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!(
        "MARKER={name}-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    )
}
