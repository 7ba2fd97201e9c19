//! `dsh-exec start` and `dsh-exec tasks`: commands in the background.
use std::io::Write as _;

use dsh_policy::ByteString;
use dsh_policy::mode::Lifetime;
use dsh_policy::task::{Cursor, TaskOutput, WaitFor};

use super::print;
use super::run::RunArgs;
use crate::address::Endpoint;
use crate::blocking::Client;
use crate::error::ClientError;
use crate::start;
use crate::tool::task as text;

const START_EXAMPLES: &str = "\
Examples:
  dsh-exec start --mode workspace-write 'make server && ./server'      prints an id such as bash-1
  dsh-exec tasks output --follow bash-1
  dsh-exec start --session s1 --description 'the tests' 'make test'    only session s1 sees it
  dsh-exec start --lifetime detached 'make nightly'                    outlives the daemon; found again by the next one";

const TASKS_EXAMPLES: &str = "\
Examples:
  dsh-exec tasks list
  dsh-exec tasks output bash-1             what it has written since the last such read
  dsh-exec tasks output --follow bash-1    everything, and then as it comes
  dsh-exec tasks wait bash-1               until it ends; leaves with its exit code
  dsh-exec tasks kill bash-1
  dsh-exec tasks end-session s1            ends every task of the session

A task ends with its session and with the daemon, not with the client that started it. A detached one ends with neither.";

/// A read of a task that goes on: longer than any command, and still answered if the daemon forgets it.
const FOLLOW_MS: u64 = 600_000;
/// Ended by a request, without a signal of its own.
const KILLED: u8 = 128 + 15;

#[derive(Debug, clap::Args)]
#[command(after_help = START_EXAMPLES)]
pub(crate) struct StartArgs {
    #[command(flatten)]
    run: RunArgs,
    /// What the task is, for lists [default: the command]
    #[arg(long, value_name = "TEXT")]
    description: Option<String>,
    /// `session`: it ends with its session and with the daemon; `detached`: with neither
    #[arg(long, value_enum, default_value_t = LifetimeArg::Session)]
    lifetime: LifetimeArg,
}

/// The lifetimes that a background command can have.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum LifetimeArg {
    Session,
    Detached,
}

#[derive(Debug, clap::Args)]
#[command(after_help = TASKS_EXAMPLES)]
pub(crate) struct TasksArgs {
    #[command(subcommand)]
    action: Action,
    /// The session that asks: others' tasks are unknown to it
    #[arg(long, global = true, value_name = "ID")]
    session: Option<String>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// The tasks that this session may see
    List,
    /// What a task has written
    Output {
        /// Which task
        task: String,
        /// From the beginning, and on until it ends
        #[arg(long)]
        follow: bool,
    },
    /// Wait for the end of a task, and leave with its exit code
    Wait {
        /// Which task
        task: String,
        /// At most so long; then leave with 124, and the task goes on
        #[arg(long, value_name = "N")]
        timeout_ms: Option<u64>,
    },
    /// End a task
    Kill {
        /// Which task
        task: String,
        /// For the daemon's log
        #[arg(long, value_name = "TEXT")]
        reason: Option<String>,
    },
    /// End every task of a session
    EndSession {
        /// Which session
        name: String,
    },
}

/// Starts a task and prints its id.
///
/// # Errors
/// [`ClientError`] when it is not started.
pub(crate) fn start(args: &StartArgs, endpoint: &Endpoint) -> Result<u8, ClientError> {
    let mut request = args.run.background_request()?;
    request.description.clone_from(&args.description);
    request.lifetime = Some(match args.lifetime {
        LifetimeArg::Session => Lifetime::Session,
        LifetimeArg::Detached => Lifetime::Detached,
    });
    let task = start::connect(endpoint)?.start(request)?;
    if args.run.json() {
        print::print_json(&task)?;
    } else {
        print::print(format!("{}\n", task.task).as_bytes())?;
    }
    Ok(0)
}

/// Does what is asked about tasks.
///
/// # Errors
/// [`ClientError`] when a task is unknown or the daemon is lost.
pub(crate) fn run(args: &TasksArgs, endpoint: &Endpoint) -> Result<u8, ClientError> {
    let mut client = start::connect(endpoint)?;
    let session = args.session.as_deref();
    match &args.action {
        Action::List => {
            let tasks = client.tasks(session)?;
            if args.json {
                print::print_json(&tasks)?;
            } else {
                print::print(format!("{}\n", text::list_text(&tasks)).as_bytes())?;
            }
            Ok(0)
        }
        Action::Output { task, follow: true } => follow(&mut client, session, task, args.json),
        Action::Output { task, follow: false } => {
            let output = client.task_output(session, task, None, WaitFor::Nothing, None)?;
            show(&output, args.json)?;
            Ok(0)
        }
        Action::Wait { task, timeout_ms } => wait(&mut client, session, task, *timeout_ms, args.json),
        Action::Kill { task, reason } => {
            let before = client.kill_task(session, task, reason.as_deref())?;
            if args.json {
                print::print_json(&before)?;
            } else {
                print::print(format!("{}\n", text::kill_text(task, &before.status)).as_bytes())?;
            }
            Ok(0)
        }
        Action::EndSession { name } => {
            let tasks = client.end_session(name)?;
            if args.json {
                print::print_json(&tasks)?;
            } else {
                print::print(format!("session {name} ended with {tasks} tasks\n").as_bytes())?;
            }
            Ok(0)
        }
    }
}

fn show(output: &TaskOutput, json: bool) -> Result<(), ClientError> {
    if json {
        return print::print_json(output);
    }
    print::print(output.stdout.as_bytes())?;
    // Nobody to tell when stderr is closed.
    let mut stderr = std::io::stderr();
    let _ = stderr.write_all(output.stderr.as_bytes());
    if output.lossy {
        let paths: Vec<String> = output.spill_paths.iter().map(ByteString::display).collect();
        let place = if paths.is_empty() {
            "(unavailable)".to_owned()
        } else {
            paths.join(" ")
        };
        let _ = writeln!(
            stderr,
            "dsh-exec: some output was dropped from memory; full output: {place}"
        );
    }
    Ok(())
}

fn follow(client: &mut Client, session: Option<&str>, task: &str, json: bool) -> Result<u8, ClientError> {
    let mut cursor = Cursor::default();
    loop {
        let output = client.task_output(session, task, Some(cursor), WaitFor::Output, Some(FOLLOW_MS))?;
        show(&output, json)?;
        if output.info.status.is_terminal() && output.next == cursor {
            return Ok(exit_code(&output));
        }
        cursor = output.next;
    }
}

fn wait(
    client: &mut Client,
    session: Option<&str>,
    task: &str,
    timeout_ms: Option<u64>,
    json: bool,
) -> Result<u8, ClientError> {
    // A cursor of its own: waiting takes nothing from whoever reads.
    let from = Some(Cursor::default());
    loop {
        let output = client.task_output(session, task, from, WaitFor::End, Some(timeout_ms.unwrap_or(FOLLOW_MS)))?;
        let ended = output.info.status.is_terminal();
        if ended || timeout_ms.is_some() {
            if json {
                print::print_json(&output.info)?;
            } else {
                print::print(format!("{}\n", text::status_text(&output.info.status)).as_bytes())?;
            }
            return Ok(if ended {
                exit_code(&output)
            } else {
                super::run::TIMED_OUT
            });
        }
    }
}

/// The exit code that stands for a task that has ended.
fn exit_code(output: &TaskOutput) -> u8 {
    match &output.result {
        Some(result) if result.signal.is_none() && result.aborted => KILLED,
        Some(result) => super::run::exit_code(result),
        None => super::INFRASTRUCTURE_FAILURE,
    }
}
