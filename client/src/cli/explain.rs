//! `dsh-exec explain`: would this be allowed, and by which rule.
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::PathBuf;

use dsh_policy::bytes::ByteString;
use dsh_policy::explain::PathAnswer;
use dsh_policy::mode::SandboxMode;
use dsh_policy::policy::PolicyRequest;
use dsh_policy::request::BashExecRequest;

use super::print;
use super::run::own_path;
use crate::address::Endpoint;
use crate::error::ClientError;
use crate::start;

const EXAMPLES: &str = "\
Examples:
  dsh-exec explain --mode workspace-write .git/config ~/.bashrc /tmp/x
  dsh-exec explain --mode workspace-write --writable ~/cache --json ~/cache/f

Paths are judged by name, as if every repository had been there before the command. Whether you may do it at all is for the kernel to say.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ExplainArgs {
    /// The mode of the command: read-only, workspace-write, danger-full-access [default: the daemon's]
    #[arg(long)]
    mode: Option<SandboxMode>,
    /// Folder that workspace-write opens for writing [default: the current directory]
    #[arg(long, value_name = "DIR")]
    workspace: Option<PathBuf>,
    /// Another folder that workspace-write opens for writing
    #[arg(long, value_name = "DIR")]
    writable: Vec<PathBuf>,
    /// A path inside writable folders that stays as it is, relative to the workspace
    #[arg(long, value_name = "P")]
    protect: Vec<OsString>,
    /// A path that cannot be read
    #[arg(long, value_name = "P")]
    deny_read: Vec<PathBuf>,
    /// A Unix socket of the host that may be reached
    #[arg(long, value_name = "P")]
    allow_unix_socket: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// What is asked about
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<PathBuf>,
}

/// Asks the daemon and prints its answers.
///
/// # Errors
/// [`ClientError`] when the request could not be run at all.
pub(crate) fn run(args: &ExplainArgs, endpoint: &Endpoint) -> Result<u8, ClientError> {
    let all = |paths: &[PathBuf]| paths.iter().map(own_path).collect::<Result<Vec<ByteString>, _>>();
    let workspace = args.workspace.clone().unwrap_or_else(|| PathBuf::from("."));
    let request = BashExecRequest {
        command: "true".into(),
        sandbox_policy: Some(PolicyRequest {
            mode: args.mode,
            workspace_root: Some(own_path(&workspace)?),
            writable: all(&args.writable)?,
            protect: args.protect.iter().cloned().map(ByteString::from).collect(),
            deny_read: all(&args.deny_read)?,
            allow_unix_socket: all(&args.allow_unix_socket)?,
            ..PolicyRequest::default()
        }),
        ..BashExecRequest::default()
    };
    let answers = start::connect(endpoint)?.explain(request, all(&args.paths)?)?;
    if args.json {
        print::print_json(&answers)?;
    } else {
        print::print(answers.iter().map(text).collect::<String>().as_bytes())?;
    }
    Ok(0)
}

/// The path, then a line for each operation.
fn text(answer: &PathAnswer) -> String {
    let mut text = format!("{}\n", answer.path.display());
    for answer in &answer.operations {
        let verdict = match (answer.rule, answer.errno) {
            (Some(rule), Some(errno)) => format!("refused: {errno} ({rule})"),
            _ => "allowed".to_owned(),
        };
        let remedy = answer.allowed_by.as_ref();
        let remedy = remedy
            .map(|change| format!(" (allowed by: {change})"))
            .unwrap_or_default();
        // Writing into a string does not fail.
        let _ = writeln!(text, "  {:<14}{verdict}{remedy}", answer.operation.to_string());
    }
    text
}
