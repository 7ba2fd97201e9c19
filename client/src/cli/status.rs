//! `dsh-exec status`: how the daemon is.
use std::fmt::Write as _;
use std::time::Duration;

use dsh_policy::wire::DaemonStatus;

use super::print;
use crate::address::Endpoint;
use crate::error::ClientError;
use crate::start;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  dsh-exec status                  starts a daemon when none runs
  dsh-exec status --no-autostart   exit code 125 when none runs
  dsh-exec status --json | jq .running")]
pub(crate) struct StatusArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Prints the daemon's status.
///
/// # Errors
/// When no daemon answers.
pub(crate) fn run(args: &StatusArgs, endpoint: &Endpoint) -> Result<u8, ClientError> {
    let status = start::connect(endpoint)?.status()?;
    if args.json {
        print::print_json(&status)?;
    } else {
        print::print(text(&status).as_bytes())?;
    }
    Ok(0)
}

fn text(status: &DaemonStatus) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name:<13} {value}");
    };
    row("server", status.server.clone());
    row("process", status.pid.to_string());
    row("socket", status.socket.display());
    row("up for", duration(Duration::from_millis(status.uptime_ms)));
    row(
        "confined by",
        status
            .tier
            .map_or("nothing, or not tried yet (see `dsh-exec doctor`)".into(), |tier| {
                format!("the {tier} tier")
            }),
    );
    row("running", status.running.to_string());
    row("connections", status.connections.to_string());
    row("finished", status.finished.to_string());
    row("failed", status.failed.to_string());
    if status.draining {
        row("state", "leaving: nothing new is started".into());
    }
    text
}

/// The two largest units: `3 d 4 h`, `12 s`.
fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60) {
        (0, 0, 0, seconds) => format!("{seconds} s"),
        (0, 0, minutes, seconds) => format!("{minutes} min {seconds} s"),
        (0, hours, minutes, _) => format!("{hours} h {minutes} min"),
        (days, hours, ..) => format!("{days} d {hours} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_told_in_its_two_largest_units() {
        for (seconds, expected) in [
            (0, "0 s"),
            (59, "59 s"),
            (60, "1 min 0 s"),
            (3_599, "59 min 59 s"),
            (3_600, "1 h 0 min"),
            (86_399, "23 h 59 min"),
            (100_000, "1 d 3 h"),
        ] {
            assert_eq!(duration(Duration::from_secs(seconds)), expected);
        }
    }

    #[test]
    fn every_field_is_shown_and_leaving_only_when_it_is_so() {
        let mut status = DaemonStatus {
            server: "dsh-execd 9.9".into(),
            pid: 41,
            uptime_ms: 61_000,
            running: 3,
            tasks: 0,
            connections: 4,
            finished: 5,
            failed: 6,
            socket: "/run/x".into(),
            tier: None,
            draining: false,
        };
        assert_eq!(
            text(&status),
            "server        dsh-execd 9.9\nprocess       41\nsocket        /run/x\nup for        1 min 1 s\n\
             confined by   nothing, or not tried yet (see `dsh-exec doctor`)\nrunning       3\nconnections   4\nfinished      5\nfailed        6\n"
        );
        status.tier = Some(dsh_policy::mode::Tier::Landlock);
        status.draining = true;
        let shown = text(&status);
        assert!(shown.contains("confined by   the landlock tier\n"), "{shown}");
        assert!(
            shown.ends_with("state         leaving: nothing new is started\n"),
            "{shown}"
        );
    }
}
