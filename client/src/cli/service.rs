//! `dsh-exec service`: the daemon as a systemd user service that starts with its first client.
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use clap::Subcommand;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{config, doctor, print};
use crate::address::Endpoint;
use crate::error::ClientError;
use crate::start;

const SOCKET: &str = "dsh-execd.socket";
const SERVICE: &str = "dsh-execd.service";
const SOCKET_UNIT: &str = include_str!("../../../daemon/systemd/dsh-execd.socket");
const SERVICE_UNIT: &str = include_str!("../../../daemon/systemd/dsh-execd.service");
/// The line of the service that depends on where this is installed.
const PACKAGED_START: &str = "ExecStart=/usr/bin/dsh-execd";
/// How long a daemon that was told to leave may take.
const LEAVE_DEADLINE: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  dsh-exec service install --dry-run   show what would be written and run
  dsh-exec service install             systemd listens for clients from now on, and after each login
  dsh-exec service status
  dsh-exec service uninstall

No service is needed: dsh-exec starts a daemon of its own when none runs.
`loginctl enable-linger` keeps a user's services while the user is not logged in.")]
pub(crate) struct ServiceArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Write the units and let systemd listen; a daemon that runs now is replaced
    Install {
        /// Print what would be done and do nothing
        #[arg(long)]
        dry_run: bool,
        /// Also when commands are running, which are ended
        #[arg(long)]
        force: bool,
    },
    /// Stop the service and remove the units
    Uninstall {
        /// Print what would be done and do nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Say whether the service is installed and active; exit code 1 when it is not
    Status,
}

/// Does what the subcommand says.
///
/// # Errors
/// When there is no systemd for this user, or a step fails.
pub(crate) fn run(args: &ServiceArgs, _: &Endpoint) -> Result<u8, ClientError> {
    let folder = unit_folder()?;
    match args.action {
        Action::Install { dry_run, force } => {
            let steps = install_steps(&folder, &daemon()?)?;
            if dry_run {
                print::print(steps.iter().map(Step::describe).collect::<String>().as_bytes())?;
                return Ok(0);
            }
            require_manager()?;
            if !force {
                require_idle()?;
            }
            perform(&steps)?;
            print::print(format!("installed in {}; systemd listens for clients\n", folder.display()).as_bytes())?;
            Ok(0)
        }
        Action::Uninstall { dry_run } => {
            let steps = uninstall_steps(&folder);
            if dry_run {
                print::print(steps.iter().map(Step::describe).collect::<String>().as_bytes())?;
                return Ok(0);
            }
            uninstall(&folder, &steps)
        }
        Action::Status => status(&folder),
    }
}

fn unit_folder() -> Result<PathBuf, ClientError> {
    config::config_folder().map(|folder| folder.join("systemd/user"))
}

fn daemon() -> Result<PathBuf, ClientError> {
    let daemon = doctor::beside("dsh-execd").map_err(|error| local(format!("cannot find this program: {error}")))?;
    if daemon.is_file() {
        Ok(daemon)
    } else {
        Err(local(format!(
            "{} does not exist; the three programs belong in one folder",
            daemon.display()
        )))
    }
}

fn local(text: String) -> ClientError {
    ClientError::Local(text)
}

/// One thing that an installation does.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Write {
        file: PathBuf,
        text: String,
    },
    Remove(PathBuf),
    /// `systemctl --user` with these words. One that may fail is about something that may not be there.
    Systemctl {
        words: &'static [&'static str],
        may_fail: bool,
    },
    /// Ends a daemon that a client started: it holds the lock that the service needs.
    EndDaemon,
}

const fn systemctl(words: &'static [&'static str]) -> Step {
    Step::Systemctl { words, may_fail: false }
}

fn install_steps(folder: &Path, daemon: &Path) -> Result<Vec<Step>, ClientError> {
    let write = |name: &str, text: String| Step::Write {
        file: folder.join(name),
        text,
    };
    Ok(vec![
        write(SOCKET, SOCKET_UNIT.to_owned()),
        write(SERVICE, service_unit(daemon)?),
        systemctl(&["daemon-reload"]),
        // The socket first, or the next client would start the service again.
        Step::Systemctl {
            words: &["stop", SOCKET, SERVICE],
            may_fail: true,
        },
        Step::EndDaemon,
        systemctl(&["enable", "--now", SOCKET]),
    ])
}

fn uninstall_steps(folder: &Path) -> Vec<Step> {
    vec![
        Step::Systemctl {
            words: &["disable", "--now", SOCKET, SERVICE],
            may_fail: true,
        },
        Step::Remove(folder.join(SOCKET)),
        Step::Remove(folder.join(SERVICE)),
        systemctl(&["daemon-reload"]),
    ]
}

/// The service with the path of this installation.
fn service_unit(daemon: &Path) -> Result<String, ClientError> {
    let path = daemon
        .to_str()
        .filter(|path| !path.contains(|c: char| c.is_control()))
        .ok_or_else(|| {
            local(format!(
                "systemd cannot start {}: its path is not plain text",
                daemon.display()
            ))
        })?;
    Ok(SERVICE_UNIT.replace(PACKAGED_START, &format!("ExecStart={}", quote(path))))
}

/// A word of a unit: `%` begins a specifier, quotes and backslashes are systemd's own.
fn quote(path: &str) -> String {
    let doubled = path.replace('%', "%%");
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+@:,%".contains(c);
    if doubled.chars().all(is_plain) {
        return doubled;
    }
    format!("\"{}\"", doubled.replace('\\', "\\\\").replace('"', "\\\""))
}

impl Step {
    /// For `--dry-run`.
    fn describe(&self) -> String {
        match self {
            Self::Write { file, text } => format!("# write {}\n{text}\n", file.display()),
            Self::Remove(file) => format!("# remove {}\n", file.display()),
            Self::Systemctl { words, .. } => format!("# run   systemctl --user {}\n", words.join(" ")),
            Self::EndDaemon => "# end   a daemon that a client started, if one runs\n".to_owned(),
        }
    }

    fn perform(&self) -> Result<(), ClientError> {
        match self {
            Self::Write { file, text } => config::write(file, text, true)
                .map_err(|error| local(format!("cannot write {}: {error}", file.display()))),
            Self::Remove(file) => match fs::remove_file(file) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    Err(local(format!("cannot remove {}: {error}", file.display())))
                }
                _ => Ok(()),
            },
            Self::Systemctl { words, may_fail } => match call(words) {
                Ok(output) if output.status.success() || *may_fail => Ok(()),
                Ok(output) => Err(local(format!(
                    "systemctl --user {} failed: {}",
                    words.join(" "),
                    said(&output)
                ))),
                Err(error) => Err(local(format!("cannot run systemctl: {error}"))),
            },
            Self::EndDaemon => end_daemon(),
        }
    }
}

fn perform(steps: &[Step]) -> Result<(), ClientError> {
    steps.iter().try_for_each(Step::perform)
}

fn call(words: &[&str]) -> io::Result<Output> {
    Command::new("systemctl").arg("--user").args(words).output()
}

fn said(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).trim().replace('\n', " ");
    if text.is_empty() {
        output.status.to_string()
    } else {
        text
    }
}

/// Why this user has no service manager to talk to.
fn manager_problem() -> Option<String> {
    match call(&["show", "--property=Version"]) {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(format!(
            "this session cannot reach the user's service manager ({}); log in as this user, or run `loginctl enable-linger` first",
            said(&output)
        )),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Some("this host has no systemd".into()),
        Err(error) => Some(format!("systemctl cannot be run: {error}")),
    }
}

fn require_manager() -> Result<(), ClientError> {
    manager_problem().map_or(Ok(()), |problem| {
        Err(local(format!(
            "nothing was installed: {problem}. No service is needed: dsh-exec starts a daemon when none runs"
        )))
    })
}

fn running_daemon() -> Option<crate::blocking::Client> {
    start::connect(&Endpoint::Default { autostart: false }).ok()
}

/// Nobody's command is ended by the way.
fn require_idle() -> Result<(), ClientError> {
    match running_daemon().map(|mut client| client.status()).transpose()? {
        Some(status) if status.running > 0 => Err(local(format!(
            "the running daemon would be replaced, and {} of its commands are not finished; wait, or --force",
            status.running
        ))),
        _ => Ok(()),
    }
}

fn end_daemon() -> Result<(), ClientError> {
    let Some(client) = running_daemon() else {
        return Ok(());
    };
    let process = client.greeting().pid;
    drop(client);
    let failed =
        |error: &dyn std::fmt::Display| local(format!("cannot end the running daemon, process {process}: {error}"));
    let pid = i32::try_from(process).ok().and_then(Pid::from_raw);
    let daemon = pidfd_open(
        pid.ok_or_else(|| failed(&"there is no such process"))?,
        PidfdFlags::empty(),
    )
    .map_err(|error| failed(&error))?;
    pidfd_send_signal(&daemon, Signal::TERM).map_err(|error| failed(&error))?;
    match poll(&mut [PollFd::new(&daemon, PollFlags::IN)], Some(&LEAVE_DEADLINE)) {
        Ok(0) => Err(failed(&"it does not leave")),
        Ok(_) => Ok(()),
        Err(error) => Err(failed(&error)),
    }
}

/// Without a manager there is nothing to stop, and the files still go.
fn uninstall(folder: &Path, steps: &[Step]) -> Result<u8, ClientError> {
    if manager_problem().is_none() {
        perform(steps)?;
    } else {
        for step in steps.iter().filter(|step| matches!(step, Step::Remove(_))) {
            step.perform()?;
        }
    }
    print::print(format!("removed from {}\n", folder.display()).as_bytes())?;
    Ok(0)
}

fn status(folder: &Path) -> Result<u8, ClientError> {
    let installed = [SOCKET, SERVICE].iter().all(|name| folder.join(name).is_file());
    let word = if installed { "installed in" } else { "not installed in" };
    let mut text = format!("units     {word} {}\n", folder.display());
    let mut is_active = false;
    if let Some(problem) = manager_problem() {
        text.push_str(&format!("systemd   {problem}\n"));
    } else {
        let state = |word: &str, unit: &str| {
            let output = call(&[word, unit]).map_err(|error| local(format!("cannot run systemctl: {error}")))?;
            Ok::<_, ClientError>(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        };
        let socket = state("is-active", SOCKET)?;
        is_active = socket == "active";
        text.push_str(&format!("socket    {socket}, {}\n", state("is-enabled", SOCKET)?));
        text.push_str(&format!("daemon    {}\n", state("is-active", SERVICE)?));
    }
    print::print(text.as_bytes())?;
    Ok(u8::from(!(installed && is_active)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_service_starts_this_installation_and_is_otherwise_as_packaged() {
        let unit = service_unit(Path::new("/home/u/.local/bin/dsh-execd")).unwrap();
        let differing: Vec<_> = SERVICE_UNIT.lines().zip(unit.lines()).filter(|(a, b)| a != b).collect();
        assert_eq!(differing, [(PACKAGED_START, "ExecStart=/home/u/.local/bin/dsh-execd")]);
    }

    #[test]
    fn a_path_is_one_word_for_systemd_whatever_is_in_it() {
        for (path, word) in [
            ("/usr/bin/dsh-execd", "/usr/bin/dsh-execd"),
            ("/a b/x", "\"/a b/x\""),
            ("/100%/x", "/100%%/x"),
            ("/a\"b\\c/x", "\"/a\\\"b\\\\c/x\""),
            ("/a;b/x", "\"/a;b/x\""),
        ] {
            assert_eq!(quote(path), word);
        }
        for path in ["/a\nExecStart=/bin/evil", "/a\tb"] {
            assert!(service_unit(Path::new(path)).is_err(), "{path:?}");
        }
    }

    #[test]
    fn installing_ends_the_old_daemon_between_the_reload_and_the_new_socket() {
        let steps = install_steps(Path::new("/c"), Path::new("/b/dsh-execd")).unwrap();
        let shown: Vec<String> = steps.iter().map(Step::describe).collect();
        assert!(
            shown[0].starts_with("# write /c/dsh-execd.socket\n") && shown[1].contains("\nExecStart=/b/dsh-execd\n")
        );
        assert_eq!(
            shown[2..],
            [
                "# run   systemctl --user daemon-reload\n",
                "# run   systemctl --user stop dsh-execd.socket dsh-execd.service\n",
                "# end   a daemon that a client started, if one runs\n",
                "# run   systemctl --user enable --now dsh-execd.socket\n",
            ]
        );
    }

    #[test]
    fn what_was_written_is_removed() {
        let temp = tempfile::tempdir().unwrap();
        let writes = |step: &Step| matches!(step, Step::Write { .. });
        let steps = install_steps(temp.path(), Path::new("/b/dsh-execd")).unwrap();
        for step in steps.iter().filter(|step| writes(step)) {
            step.perform().unwrap();
        }
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 2);
        for _ in 0..2 {
            for step in uninstall_steps(temp.path())
                .iter()
                .filter(|step| matches!(step, Step::Remove(_)))
            {
                step.perform().unwrap();
            }
            assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 0);
        }
    }
}
