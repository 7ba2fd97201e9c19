//! The command line of `dsh-execd`.
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser};

use crate::config::Config;
use crate::keeper;
use crate::paths::Surroundings;
use crate::start::{self, Started};

const EXAMPLES: &str = "\
Examples:
  dsh-execd                        serve $XDG_RUNTIME_DIR/dsh-execd/socket until a signal
  dsh-execd --check-config         say whether the configuration can be used, and show it whole
  dsh-execd --config ./try.toml --socket ~/try/socket
  systemctl --user enable --now dsh-execd.socket

SIGHUP reads the configuration again. SIGTERM ends running commands, delivers their results and leaves.
Clients start a daemon by themselves; see dsh-exec(1).";

/// Runs shell commands of this user's clients, each confined by a helper process.
#[derive(Debug, Parser)]
#[command(name = "dsh-execd", version, after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Listen here instead of the usual place; the folder must belong to this user alone
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// Read this file instead of the usual one
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Leave when nobody has been connected for so many milliseconds (0: never)
    #[arg(long, value_name = "N")]
    pub(crate) idle_exit_ms: Option<u64>,
    /// A client starts it for its own need: leave when idle, as `idleExitMs` of the configuration says
    #[arg(long)]
    pub(crate) on_demand: bool,
    /// Print `ready` once it listens (or `exists` when another daemon does), then close stdout
    #[arg(long)]
    pub(crate) ready_stdout: bool,
    /// Keep one detached task (what a daemon starts by itself)
    #[arg(long, value_name = "FOLDER", hide = true)]
    pub(crate) keep: Option<PathBuf>,
    /// Print the manual page and leave
    #[arg(long)]
    pub(crate) man: bool,
    /// Check the configuration, show it with every default, and leave
    #[arg(long)]
    pub(crate) check_config: bool,
}

/// Reads the command line, does what it says, and says how that went.
#[must_use]
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.man {
        return print_man();
    }
    if arguments.check_config {
        return check_config(&arguments);
    }
    if let Some(folder) = arguments.keep {
        return keeper::main(folder);
    }
    match start::daemon(&arguments) {
        Ok(Started::Served) => ExitCode::SUCCESS,
        Ok(Started::Exists) if arguments.ready_stdout => {
            print_line("exists");
            ExitCode::SUCCESS
        }
        Ok(Started::Exists) => complain("another dsh-execd serves this socket already"),
        Err(error) => complain(&error.to_string()),
    }
}

fn print_man() -> ExitCode {
    let mut page = Vec::new();
    match clap_mangen::Man::new(Arguments::command()).render(&mut page) {
        Ok(()) => {
            print_line(&String::from_utf8_lossy(&page));
            ExitCode::SUCCESS
        }
        Err(error) => complain(&format!("cannot make the manual page: {error}")),
    }
}

fn check_config(arguments: &Arguments) -> ExitCode {
    let file = arguments
        .config
        .clone()
        .or_else(|| Surroundings::from_lookup(|name| std::env::var_os(name)).config);
    match file.as_deref().map_or_else(|| Ok(Config::default()), Config::load) {
        Ok(config) => {
            print_line(&config.to_toml());
            ExitCode::SUCCESS
        }
        Err(error) => complain(&error.to_string()),
    }
}

/// A reader that has gone does not want to know.
fn print_line(text: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stdout(), "{}", text.trim_end());
}

pub(crate) fn complain(text: &str) -> ExitCode {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "dsh-execd: {text}");
    ExitCode::FAILURE
}
