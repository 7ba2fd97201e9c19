//! The command's process tree: who belongs to it, ending it, and the proof that nothing is left.
//!
//! The helper is the reaper of every orphan below it, so "no child left" (`ECHILD`) means that the whole tree is gone, however often it forked,
//! changed its session or lost its parents. Process groups are never used: a process can leave its group, but not its ancestors.
use std::io::Write as _;
use std::os::fd::OwnedFd;

use dsh_policy::plan::ExitStatus;
use rustix::fs::{CWD, Dir, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{WaitOptions, wait};

use crate::sys;

/// Deepest tree that is walked in one go; what lies deeper is found in the next round, when its ancestors are gone.
const MAX_DEPTH: usize = 256;

/// What reaping found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reaped {
    /// The watched process has ended, like this.
    pub(crate) watched: Option<ExitStatus>,
    /// There is no child left, living or dead.
    pub(crate) empty: bool,
}

/// `__WALL`, for which rustix has no name: children that tell nobody of their end by SIGCHLD are children too.
fn clones() -> WaitOptions {
    WaitOptions::from_bits_retain(libc::__WALL.cast_unsigned())
}

/// Collects every child that has ended.
pub(crate) fn reap(watched: i32) -> Reaped {
    let mut reaped = Reaped::default();
    loop {
        let (pid, status) = match wait(WaitOptions::NOHANG | clones()) {
            Ok(Some(ended)) => ended,
            Ok(None) => return reaped,
            Err(Errno::CHILD) => {
                reaped.empty = true;
                return reaped;
            }
            Err(_) => continue,
        };
        if pid.as_raw_pid() == watched {
            reaped.watched = match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => Some(ExitStatus::Code(code)),
                (None, Some(signal)) => Some(ExitStatus::Signal(signal)),
                (None, None) => continue,
            };
        }
    }
}

/// Every living process below the helper, parents before children.
pub(crate) fn descendants() -> Vec<i32> {
    let mut found = Vec::new();
    let own = rustix::process::getpid().as_raw_nonzero().get();
    collect(own, 0, &mut found);
    found
}

fn collect(pid: i32, depth: usize, found: &mut Vec<i32>) {
    if depth > MAX_DEPTH {
        return;
    }
    for thread in threads(pid) {
        for child in children(pid, thread) {
            found.push(child);
            collect(child, depth + 1, found);
        }
    }
}

/// The threads of a process: each has children of its own.
fn threads(pid: i32) -> Vec<i32> {
    let Some(folder) = open(&format!("/proc/{pid}/task"), OFlags::DIRECTORY) else {
        return Vec::new();
    };
    let Ok(entries) = Dir::new(folder) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str().ok()?.parse().ok())
        .collect()
}

fn children(pid: i32, thread: i32) -> Vec<i32> {
    let text = read(&format!("/proc/{pid}/task/{thread}/children"));
    text.split(u8::is_ascii_whitespace)
        .filter_map(|word| std::str::from_utf8(word).ok()?.parse().ok())
        .collect()
}

/// Sends `signal` to every descendant and says how many there were.
pub(crate) fn signal_all(signal: i32) -> usize {
    let all = descendants();
    for pid in &all {
        // It may have ended meanwhile. Its number would have to come round the whole range of numbers within this loop to name a stranger.
        let _ = sys::kill(*pid, signal);
    }
    all.len()
}

/// The parents of a process, nearest first, up to and including `shell`. Empty when the process is the shell or not below the helper.
pub(crate) fn parents(pid: i32, shell: i32) -> Vec<u32> {
    let mut chain = Vec::new();
    let mut current = pid;
    while current != shell && chain.len() < MAX_DEPTH {
        let Some(parent) = parent(current) else { break };
        if parent == rustix::process::getpid().as_raw_nonzero().get() || parent <= 1 {
            if chain
                .last()
                .is_some_and(|last: &u32| is_first_inside(last.cast_signed()))
            {
                chain.pop();
            }
            break;
        }
        chain.push(parent.cast_unsigned());
        current = parent;
    }
    chain
}

/// Whether a process is below the helper.
pub(crate) fn is_ours(pid: i32) -> bool {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let mut current = pid;
    for _ in 0..MAX_DEPTH * 4 {
        match parent(current) {
            Some(parent) if parent == own => return true,
            Some(parent) if parent > 1 => current = parent,
            _ => return false,
        }
    }
    false
}

/// The parent of a process (of the thread group, when given a thread).
pub(crate) fn parent(pid: i32) -> Option<i32> {
    status_field(pid, b"PPid:")
}

/// The process that a thread belongs to.
pub(crate) fn thread_group(thread: i32) -> Option<i32> {
    status_field(thread, b"Tgid:")
}

/// The number that a process or thread has in its own pid namespace.
pub(crate) fn inner_number(pid: i32) -> Option<i32> {
    numbers(pid).last().copied()
}

/// Whether a process is the first one of a pid namespace inside the helper's: it collects orphans and belongs to the sandbox.
fn is_first_inside(pid: i32) -> bool {
    matches!(numbers(pid).as_slice(), [_, .., 1])
}

/// The numbers of a process in every pid namespace from the helper's down to its own.
fn numbers(pid: i32) -> Vec<i32> {
    let status = read_start(&proc_path(pid, "status"), 1024);
    let line = status
        .split(|byte| *byte == b'\n')
        .find_map(|line| line.strip_prefix(b"NSpid:"));
    line.unwrap_or_default()
        .split(u8::is_ascii_whitespace)
        .filter_map(|word| std::str::from_utf8(word).ok()?.parse().ok())
        .collect()
}

/// A numeric field of `/proc/PID/status`.
fn status_field(pid: i32, name: &[u8]) -> Option<i32> {
    let status = read_start(&proc_path(pid, "status"), 1024);
    let line = status
        .split(|byte| *byte == b'\n')
        .find(|line| line.starts_with(name))?;
    std::str::from_utf8(&line[name.len()..]).ok()?.trim().parse().ok()
}

/// `/proc/PID/NAME`.
pub(crate) fn proc_path(pid: i32, name: &str) -> String {
    format!("/proc/{pid}/{name}")
}

fn open(path: &str, flags: OFlags) -> Option<OwnedFd> {
    rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC | flags, Mode::empty()).ok()
}

/// The first bytes of a small file; empty when it cannot be read.
pub(crate) fn read_start(path: &str, limit: usize) -> Vec<u8> {
    let Some(file) = open(path, OFlags::empty()) else {
        return Vec::new();
    };
    let mut text = vec![0; limit];
    let length = rustix::io::read(&file, &mut text).unwrap_or(0);
    text.truncate(length);
    text
}

/// The whole of a file; what could be read when something fails.
pub(crate) fn read(path: &str) -> Vec<u8> {
    let Some(file) = open(path, OFlags::empty()) else {
        return Vec::new();
    };
    let mut text = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(length @ 1..) = rustix::io::read(&file, &mut buffer) {
        if text.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
    text
}
