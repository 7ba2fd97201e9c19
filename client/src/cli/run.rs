//! `dsh-exec run`: arguments to a request, and what is said at the end.
use std::ffi::OsString;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser};

use dsh_policy::bytes::ByteString;
use dsh_policy::mode::{Network, SandboxMode, TmpKind};
use dsh_policy::policy::PolicyRequest;
use dsh_policy::request::{BashExecRequest, EnvMap};
use dsh_policy::result::BashRunResult;

use super::live::{self, Live};
use super::print;
use crate::address::Endpoint;
use crate::blocking::Client;
use crate::error::ClientError;
use crate::{start, tool};

/// Exit code after the time limit, as timeout(1) has it.
pub(super) const TIMED_OUT: u8 = 124;
/// Added to a signal's number.
const SIGNALLED: u8 = 128;

const EXAMPLES: &str = "\
Examples:
  dsh-exec run 'ls | wc -l'
  dsh-exec run --mode workspace-write --workspace ~/project 'make test'
  dsh-exec run --json --timeout-ms 5000 'curl -s http://localhost:8080'
  dsh-exec run --stdin data.csv 'sort -u'
  dsh-exec run --env GREETING=hello -- 'echo \"$GREETING\"'
  dsh-exec run --explain --mode workspace-write true     what would be applied, without running";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RunCommand {
    #[command(flatten)]
    pub(super) args: RunArgs,
}

/// What `run` and `start` have in common.
#[derive(Debug, clap::Args)]
pub(crate) struct RunArgs {
    /// How wide file effects may be: read-only, workspace-write, danger-full-access [default: the daemon's]
    #[arg(long)]
    mode: Option<SandboxMode>,
    /// Folder that workspace-write opens for writing [default: the current directory]
    #[arg(long, value_name = "DIR")]
    workspace: Option<PathBuf>,
    /// Where the command starts, relative to the workspace [default: the workspace]
    #[arg(long, value_name = "DIR")]
    workdir: Option<OsString>,
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
    /// What the network may reach: full, loopback, none [default: the daemon's]
    #[arg(long)]
    network: Option<Network>,
    /// Which /tmp: shared, private [default: the daemon's]
    #[arg(long)]
    tmp: Option<TmpKind>,
    /// Time limit in milliseconds
    #[arg(long, value_name = "N")]
    timeout_ms: Option<u64>,
    /// Bytes of stdout to keep in the result
    #[arg(long, value_name = "N")]
    stdout_max_bytes: Option<u64>,
    /// Set a variable; this wins over every rule
    #[arg(long, value_name = "K=V", value_parser = variable())]
    env: Vec<Variable>,
    /// Set a managed variable, whose name starts with DSH_
    #[arg(long, value_name = "K=V", value_parser = variable())]
    dsh_env: Vec<Variable>,
    /// File mode creation mask in octal [default: this process's]
    #[arg(long, value_name = "OCTAL", value_parser = octal)]
    umask: Option<u32>,
    /// Standard input of the command: a file, or - for this one's [default: empty]
    #[arg(long, value_name = "FILE|-")]
    stdin: Option<PathBuf>,
    /// Name of the session this belongs to
    #[arg(long, value_name = "ID")]
    session: Option<String>,
    /// Print one JSON object, the result, instead of the output
    #[arg(long, conflicts_with = "render")]
    json: bool,
    /// Print the text that a model would see instead of the output
    #[arg(long)]
    render: bool,
    /// Print how the request would be applied, as JSON, and run nothing
    #[arg(long, conflicts_with_all = ["json", "render"])]
    explain: bool,
    /// What `bash -c` gets, as one argument
    #[arg(value_name = "COMMAND")]
    command: OsString,
}

/// One `NAME=VALUE`, cut at its first `=`.
type Variable = (ByteString, ByteString);

fn variable() -> impl TypedValueParser<Value = Variable> {
    OsStringValueParser::new().try_map(|pair| {
        let bytes = pair.as_bytes();
        let equals = bytes.iter().position(|byte| *byte == b'=').filter(|at| *at > 0);
        let equals = equals.ok_or("expected NAME=VALUE")?;
        Ok::<_, &str>((
            ByteString::from(&bytes[..equals]),
            ByteString::from(&bytes[equals + 1..]),
        ))
    })
}

fn octal(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mask| *mask <= 0o777)
        .ok_or_else(|| format!("`{text}` is not an octal mask from 0 to 777"))
}

/// Runs the command and gives the exit code.
///
/// # Errors
/// [`ClientError`] when nothing ran or the fate is unknown.
pub(crate) fn run(args: &RunArgs, endpoint: &Endpoint) -> Result<u8, ClientError> {
    let request = request(args)?;
    let input = args.stdin.as_deref().map(live::Input::open).transpose()?;
    let mut client = start::connect(endpoint)?;
    if args.explain {
        return explain(&mut client, request);
    }
    let stream = !args.json && !args.render;
    let outcome = Live::new(client, input, stream)?.run(request)?;
    let result = &outcome.result;
    if args.json {
        print::print_json(result)?;
    } else if args.render {
        let mut text = tool::render::render_result(result, false);
        if !text.ends_with('\n') {
            text.push('\n');
        }
        print::print(text.as_bytes())?;
    } else {
        report(result, &outcome.missed);
    }
    if outcome.interrupted {
        return Ok(SIGNALLED + outcome.interrupted_by);
    }
    if let Some(error) = outcome.stdout_failed {
        return Err(error);
    }
    Ok(exit_code(result))
}

impl RunArgs {
    /// The request of a command that nobody waits for. What is only about waiting for it is refused.
    pub(super) fn background_request(&self) -> Result<BashExecRequest, ClientError> {
        let only_run = [
            (self.render, "--render"),
            (self.explain, "--explain"),
            (
                self.timeout_ms.is_some(),
                "--timeout-ms (a background command has no time limit)",
            ),
        ];
        if let Some((_, flag)) = only_run.iter().find(|(given, _)| *given) {
            return Err(ClientError::Local(format!(
                "{flag} is for `dsh-exec run`, not for `start`"
            )));
        }
        let mut request = request(self)?;
        if let Some(path) = &self.stdin {
            request.stdin = Some(live::Input::open(path)?.read_whole()?);
            request.stdin_open = false;
        }
        Ok(request)
    }

    /// Whether the answer is to be JSON.
    pub(super) fn json(&self) -> bool {
        self.json
    }
}

fn explain(client: &mut Client, mut request: BashExecRequest) -> Result<u8, ClientError> {
    crate::ambient::attach(&mut request, &client.greeting().environment);
    let spec = client.resolve(request)?;
    let mut text = serde_json::to_vec_pretty(&spec).map_err(|error| ClientError::Local(error.to_string()))?;
    text.push(b'\n');
    print::print(&text)?;
    Ok(0)
}

fn request(args: &RunArgs) -> Result<BashExecRequest, ClientError> {
    let workspace = match &args.workspace {
        Some(workspace) => workspace.clone(),
        None => std::env::current_dir().map_err(|error| {
            ClientError::Local(format!("the current directory is gone ({error}); name a --workspace"))
        })?,
    };
    Ok(BashExecRequest {
        command: ByteString::from(args.command.as_os_str()),
        workdir: args.workdir.clone().map(ByteString::from),
        timeout_ms: args.timeout_ms,
        stdout_max_bytes: args.stdout_max_bytes,
        stdin_open: args.stdin.is_some(),
        env: variables(&args.env),
        dsh_env: variables(&args.dsh_env),
        sandbox_policy: Some(PolicyRequest {
            mode: args.mode,
            workspace_root: Some(own_path(&workspace)?),
            writable: args.writable.iter().map(own_path).collect::<Result<_, _>>()?,
            protect: args.protect.iter().cloned().map(ByteString::from).collect(),
            deny_read: args.deny_read.iter().map(own_path).collect::<Result<_, _>>()?,
            allow_unix_socket: args.allow_unix_socket.iter().map(own_path).collect::<Result<_, _>>()?,
            network: args.network,
            tmp: args.tmp,
        }),
        session: args.session.clone(),
        umask: args.umask,
        ..BashExecRequest::default()
    })
}

/// A path of the caller: what is relative is meant from the caller's current directory. Symlinks and `..` are left for the daemon to resolve.
pub(super) fn own_path(path: &PathBuf) -> Result<ByteString, ClientError> {
    if path.is_absolute() || path.starts_with("~") {
        return Ok(ByteString::from(path.as_path()));
    }
    let here = std::env::current_dir()
        .map_err(|error| ClientError::Local(format!("the current directory is gone ({error})")))?;
    Ok(ByteString::from(here.join(path)))
}

/// The last of two values for one name wins, as in a shell.
fn variables(pairs: &[Variable]) -> Option<EnvMap> {
    (!pairs.is_empty()).then(|| pairs.iter().cloned().collect())
}

/// What is said on stderr after the output: refusals, and what could not be shown. Nothing at all after an ordinary run.
fn report(result: &BashRunResult, missed: &[live::Missed]) {
    let mut stderr = std::io::stderr().lock();
    // Nobody to tell when stderr is closed.
    let mut say = |line: String| drop(writeln!(stderr, "dsh-exec: {line}"));
    for missed in missed {
        let stream = if missed.stream == dsh_policy::wire::StreamName::Stdout {
            &result.stdout
        } else {
            &result.stderr
        };
        let place = stream
            .spill_path
            .as_ref()
            .map_or_else(|| "(unavailable)".to_owned(), ByteString::display);
        say(format!(
            "{} bytes of {} came faster than they could be shown; full output: {place}",
            missed.bytes, missed.stream
        ));
    }
    if let Some(confined) = &result.sandbox.confined {
        for fact in &confined.denials {
            let remedy = fact
                .allowed_by
                .as_ref()
                .map(|change| format!(" (allowed by: {change})"))
                .unwrap_or_default();
            say(format!("refused: {}{remedy}", fact.summary()));
        }
        if confined.denials_dropped > 0 {
            say(format!("refused: {} more operations", confined.denials_dropped));
        }
        if !confined.observed && result.exit_code != Some(0) {
            say(format!(
                "refusals were not observed: {}",
                confined.unobserved_reason.as_deref().unwrap_or("unknown reason")
            ));
        }
    }
    if result.timed_out {
        say(format!("timed out after {} ms", result.timeout_ms));
    }
    if result.survivors > 0 {
        say(format!(
            "{} processes of the command could not be ended",
            result.survivors
        ));
    }
}

/// The exit code that stands for a result.
pub(super) fn exit_code(result: &BashRunResult) -> u8 {
    if result.timed_out {
        return TIMED_OUT;
    }
    match (&result.signal, result.exit_code) {
        (Some(name), _) => SIGNALLED.saturating_add(live::signal_number(name)),
        (None, Some(code)) => u8::try_from(code).unwrap_or(u8::MAX),
        (None, None) => super::INFRASTRUCTURE_FAILURE,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_is_octal_and_a_pair_needs_a_name() {
        assert_eq!(octal("027"), Ok(0o027));
        assert!(octal("8").is_err() && octal("1777").is_err());
        let parse = |pair: &str| variable().parse_ref(&clap::Command::new("run"), None, pair.as_ref());
        assert_eq!(
            parse("A=b=c").unwrap(),
            (ByteString::from("A"), ByteString::from("b=c"))
        );
        assert_eq!(parse("E=").unwrap(), (ByteString::from("E"), ByteString::from("")));
        assert!(parse("=x").is_err() && parse("NOVALUE").is_err());
    }
}
