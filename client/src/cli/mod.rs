//! The command line `dsh-exec`: which command, which daemon, which exit code.
mod completions;
mod config;
mod doctor;
mod explain;
mod live;
mod man;
mod mcp;
mod print;
mod run;
mod service;
mod status;
mod tasks;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

use crate::address::Endpoint;
use crate::error::ClientError;

/// Exit code when the command could not be run, or its fate is unknown.
const INFRASTRUCTURE_FAILURE: u8 = 125;
/// Number of the signal for a closed pipe.
const SIGPIPE: u8 = 13;

const EXAMPLES: &str = "\
Examples:
  dsh-exec run 'ls -la'                            read-only: nothing on the host can change
  dsh-exec run --mode workspace-write 'make -j2'   writes below the current directory and /tmp
  dsh-exec run --json 'touch /etc/x'               one JSON object that says what was refused
  dsh-exec doctor                                  what this host can enforce

A daemon of your own is started when none runs. Exit codes of `run`: the command's own; 128+N when signal N ended it;
124 after the time limit; 125 when it could not be run; 130 after Ctrl-C; 2 for a wrong command line.";

/// Runs shell commands confined, and says what was refused.
#[derive(Debug, Parser)]
#[command(name = "dsh-exec", version, after_help = EXAMPLES, max_term_width = 120)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    daemon: DaemonArguments,
}

/// Which daemon.
#[derive(Debug, clap::Args)]
struct DaemonArguments {
    /// Socket of a running daemon; none is started then
    #[arg(long, global = true, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Do not start a daemon when none runs
    #[arg(long, global = true)]
    no_autostart: bool,
}

impl DaemonArguments {
    fn endpoint(&self) -> Endpoint {
        match &self.socket {
            Some(socket) => Endpoint::Socket(socket.clone()),
            None => Endpoint::Default {
                autostart: !self.no_autostart,
            },
        }
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a command
    Run(Box<run::RunCommand>),
    /// Say whether a path could be read, written, … by a command, and by which rule; nothing is run
    Explain(Box<explain::ExplainArgs>),
    /// Run a command in the background
    Start(Box<tasks::StartArgs>),
    /// List, read, wait for and end background commands
    Tasks(tasks::TasksArgs),
    /// Say how the daemon is
    Status(status::StatusArgs),
    /// Say what this host can enforce, what is missing and how to get it
    Doctor(doctor::DoctorArgs),
    /// Show, locate or write the configuration
    Config(config::ConfigArgs),
    /// Install the daemon as a systemd user service
    Service(service::ServiceArgs),
    /// Serve the bash tool to a client of the Model Context Protocol on standard input and output
    Mcp(mcp::McpArgs),
    /// Print the manual page, or write all of them into a folder
    Man(man::ManArgs),
    /// Print completions for a shell
    Completions(completions::CompletionsArgs),
}

/// Reads the command line, does what it says, and gives the exit code.
#[must_use]
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let endpoint = arguments.daemon.endpoint();
    let outcome = match &arguments.command {
        Command::Run(command) => run::run(&command.args, &endpoint),
        Command::Explain(args) => explain::run(args, &endpoint),
        Command::Start(args) => tasks::start(args, &endpoint),
        Command::Tasks(args) => tasks::run(args, &endpoint),
        Command::Status(args) => status::run(args, &endpoint),
        Command::Doctor(args) => doctor::run(args, &endpoint),
        Command::Config(args) => config::run(args, &endpoint),
        Command::Service(args) => service::run(args, &endpoint),
        Command::Mcp(args) => mcp::run(args, &endpoint),
        Command::Man(args) => man::run(args, Arguments::command()),
        Command::Completions(args) => completions::run(args, Arguments::command()),
    };
    ExitCode::from(outcome.unwrap_or_else(|error| match error {
        // As if the signal for it had ended this process: whoever stopped reading knows.
        ClientError::OutputClosed => 128 + SIGPIPE,
        error => {
            complain(&error);
            INFRASTRUCTURE_FAILURE
        }
    }))
}

/// One line on stderr.
fn complain(error: &ClientError) {
    let text = error.to_string().replace('\n', " ");
    // Nobody to tell when stderr is closed.
    let _ = writeln!(std::io::stderr(), "dsh-exec: {}", text.trim_end());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }
}
