//! `dsh-exec doctor`: what this host can enforce, what is missing and how to get it.
use std::fmt::Write as _;
use std::io::Read as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use dsh_policy::codec;
use dsh_policy::probe::{ProbeReport, TierReport};

use super::print;
use crate::address::Endpoint;
use crate::error::ClientError;
use crate::start;

/// How long the helper may try things out.
const PROBE_DEADLINE: Duration = Duration::from_secs(10);
/// Between two looks at whether it has ended.
const LOOK: Duration = Duration::from_millis(5);

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  dsh-exec doctor                  what this host can enforce, and how to get the rest
  dsh-exec doctor --json | jq '.tiers[] | select(.usable) | .tier'

Everything is tried afresh in a child that is thrown away. Exit code 0 when commands can be confined, 1 when they cannot.")]
pub(crate) struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Prints what the host can enforce.
///
/// # Errors
/// When neither a daemon nor the helper can be asked.
pub(crate) fn run(args: &DoctorArgs, endpoint: &Endpoint) -> Result<u8, ClientError> {
    let report = probe(endpoint)?;
    if args.json {
        print::print_json(&report)?;
    } else {
        print::print(text(&report).as_bytes())?;
    }
    Ok(u8::from(report.best_tier().is_none()))
}

/// Asks the daemon; on a host where none can be started, that is when a doctor is needed most, the helper itself.
fn probe(endpoint: &Endpoint) -> Result<ProbeReport, ClientError> {
    match (start::connect(endpoint), endpoint) {
        (Ok(mut client), _) => client.probe(),
        (Err(error @ ClientError::Unreachable(_)), Endpoint::Default { .. }) => {
            let report = probe_by_helper().map_err(|reason| {
                ClientError::Unreachable(format!("{error}; and the helper cannot be asked instead: {reason}"))
            })?;
            super::complain(&ClientError::Unreachable(format!(
                "{error}; the helper was asked directly"
            )));
            Ok(report)
        }
        (Err(error), _) => Err(error),
    }
}

fn probe_by_helper() -> Result<ProbeReport, String> {
    let helper = beside("dsh-exec-helper").map_err(|error| error.to_string())?;
    let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", helper.display());
    let mut child = Command::new(&helper)
        .arg("--probe")
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| failed(&error))?;
    // Its report is far smaller than a pipe, so that it never waits for a reader.
    wait(&mut child).map_err(|error| failed(&error))?;
    let mut json = Vec::new();
    if let Some(mut stdout) = child.stdout.take() {
        stdout.read_to_end(&mut json).map_err(|error| failed(&error))?;
    }
    codec::from_json(&json).map_err(|error| failed(&error))
}

/// A program in the folder of this one.
pub(super) fn beside(name: &str) -> std::io::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(name))
}

fn wait(child: &mut Child) -> Result<(), String> {
    let deadline = Instant::now() + PROBE_DEADLINE;
    while child.try_wait().map_err(|error| error.to_string())?.is_none() {
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("it did not end within {} s", PROBE_DEADLINE.as_secs()));
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

fn text(report: &ProbeReport) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name:<17} {value}");
    };
    row("kernel", format!("{} ({})", report.kernel, report.arch));
    let modules = report.lsm.as_deref().unwrap_or("unknown: the list cannot be read here");
    row("security modules", modules.to_owned());
    row(
        "Landlock",
        match report.landlock_abi {
            0 => "missing".to_owned(),
            abi => format!("ABI {abi}"),
        },
    );
    row("seccomp filters", usable(report.seccomp_filter, None));
    row(
        "seccomp notices",
        usable(report.seccomp_notify, report.seccomp_notify_reason.as_deref()),
    );
    row(
        "user namespaces",
        usable(report.user_namespaces, report.user_namespaces_reason.as_deref()),
    );
    text.push_str("\nWhat confines commands, best first:\n");
    let in_use = report.best_tier();
    for tier in &report.tiers {
        add_tier(&mut text, tier, Some(tier.tier) == in_use);
    }
    if in_use.is_none() {
        text.push_str("\nNothing: only the mode danger-full-access runs here.\n");
    }
    if !report.advice.is_empty() {
        text.push_str("\nWhat to do:\n");
        for advice in &report.advice {
            let _ = writeln!(text, "  - {advice}");
        }
    }
    text
}

fn usable(usable: bool, reason: Option<&str>) -> String {
    match (usable, reason) {
        (true, _) => "usable".into(),
        (false, Some(reason)) => format!("not usable: {reason}"),
        (false, None) => "not usable".into(),
    }
}

fn add_tier(text: &mut String, tier: &TierReport, is_best: bool) {
    let mut state = usable(tier.usable, tier.reason.as_deref());
    if is_best {
        state.push_str(", the best here");
    }
    if !tier.unenforced.is_empty() {
        state.push_str("; cannot promise:");
    }
    let _ = writeln!(text, "  {:<10} {state}", tier.tier.as_str());
    for lack in &tier.unenforced {
        let _ = writeln!(text, "             {}: {}", lack.guarantee, lack.reason);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const HOST: &str = r#"{"kernel":"6.1.0","arch":"x86_64","landlockAbi":2,"seccompFilter":true,"seccompNotify":false,
        "seccompNotifyReason":"EBUSY","userNamespaces":false,"userNamespacesReason":"write uid_map: EPERM","tiers":[
        {"tier":"namespace","usable":false,"reason":"write uid_map: EPERM"},
        {"tier":"landlock","usable":true,"unenforced":[{"guarantee":"network","reason":"needs ABI 4"}]},
        {"tier":"mount","usable":false,"reason":"write uid_map: EPERM"}],"advice":["allow user namespaces"]}"#;

    #[test]
    fn a_report_says_what_is_there_what_is_not_why_and_what_to_do() {
        let report: ProbeReport = codec::from_json(HOST.as_bytes()).unwrap();
        assert_eq!(
            text(&report),
            "\
kernel            6.1.0 (x86_64)
security modules  unknown: the list cannot be read here
Landlock          ABI 2
seccomp filters   usable
seccomp notices   not usable: EBUSY
user namespaces   not usable: write uid_map: EPERM

What confines commands, best first:
  namespace  not usable: write uid_map: EPERM
  landlock   usable, the best here; cannot promise:
             network: needs ABI 4
  mount      not usable: write uid_map: EPERM

What to do:
  - allow user namespaces
"
        );
    }

    #[test]
    fn a_host_that_can_confine_nothing_is_told_so() {
        let mut report: ProbeReport = codec::from_json(HOST.as_bytes()).unwrap();
        report.tiers[1].usable = false;
        report.landlock_abi = 0;
        let shown = text(&report);
        assert!(shown.contains("Landlock          missing\n"), "{shown}");
        assert!(
            shown.contains("\nNothing: only the mode danger-full-access runs here.\n"),
            "{shown}"
        );
    }
}
