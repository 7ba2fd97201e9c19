//! What a dead helper leaves behind: its descendants become children of the daemon, which kills them and proves them dead.
use std::collections::BTreeSet;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use tokio::time::{Instant, sleep};

use crate::helper::Helpers;

/// How long the daemon tries. A process in an uninterruptible sleep cannot be ended by anybody.
const DEADLINE: Duration = Duration::from_secs(5);

/// Kills and reaps every child of the daemon that is not a helper, and their descendants as they become children in turn.
pub(crate) async fn orphans(helpers: &Arc<Helpers>) {
    let until = Instant::now() + DEADLINE;
    let mut pause = Duration::from_micros(200);
    loop {
        let strangers = helpers.strangers(children());
        if strangers.as_ref().is_some_and(Vec::is_empty) {
            return;
        }
        let strangers = strangers.unwrap_or_default();
        for pid in &strangers {
            end(*pid);
        }
        if Instant::now() > until {
            tracing::error!(
                count = strangers.len(),
                "processes of a lost command could not be ended"
            );
            return;
        }
        sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// Kills one child and collects it if it is dead. Only own children are signalled: their pid cannot be reused before they are collected.
/// What is below them becomes a child in turn and is met in the next round.
fn end(pid: i32) {
    let Some(process) = Pid::from_raw(pid) else { return };
    // Errors mean that it is dead already, which the next round sees.
    let _ = kill_process(process, Signal::KILL);
    let _ = waitpid(Some(process), WaitOptions::NOHANG);
}

/// Children of the daemon itself.
fn children() -> BTreeSet<i32> {
    children_of(std::process::id().cast_signed())
}

/// Children of all threads of a process; the kernel keeps one list per thread.
fn children_of(pid: i32) -> BTreeSet<i32> {
    let mut found = BTreeSet::new();
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return found;
    };
    for thread in threads.flatten() {
        match fs::read_to_string(thread.path().join("children")) {
            Ok(list) => found.extend(list.split_whitespace().filter_map(|word| word.parse::<i32>().ok())),
            // A kernel without the per-thread lists: look at everybody's parent instead.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && thread.path().exists() => {
                return children_by_parent(pid);
            }
            Err(_) => {}
        }
    }
    found
}

fn children_by_parent(parent: i32) -> BTreeSet<i32> {
    let Ok(processes) = fs::read_dir("/proc") else {
        return BTreeSet::new();
    };
    processes
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| parent_of(*pid) == Some(parent))
        .collect()
}

/// The parent of a process, from the fields after its name (which may contain anything).
pub(crate) fn parent_of(pid: i32) -> Option<i32> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let after_name = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(stat.get(after_name + 1..)?).ok()?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_of_listing_children_find_a_real_child() {
        let mut child = std::process::Command::new("/bin/sleep").arg("60").spawn().unwrap();
        let pid = child.id().cast_signed();
        assert!(children().contains(&pid));
        assert!(children_by_parent(std::process::id().cast_signed()).contains(&pid));
        assert_eq!(parent_of(pid), Some(std::process::id().cast_signed()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!children().contains(&pid));
    }
}
