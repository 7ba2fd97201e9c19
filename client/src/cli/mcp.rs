//! `dsh-exec mcp`: the `bash` tool for a client of the Model Context Protocol.
use std::path::PathBuf;

use dsh_policy::SandboxMode;

use crate::address::Endpoint;
use crate::error::ClientError;
use crate::mcp::{self, Settings};

const EXAMPLES: &str = "\
Examples:
  dsh-exec mcp                                         read-only, in the client's first root
  dsh-exec mcp --mode workspace-write --workspace ~/project

In a client's configuration:
  {\"mcpServers\": {\"bash\": {\"command\": \"dsh-exec\", \"args\": [\"mcp\", \"--mode\", \"workspace-write\"]}}}";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct McpArgs {
    /// How wide file effects may be: read-only, workspace-write, danger-full-access [default: the daemon's]
    #[arg(long)]
    mode: Option<SandboxMode>,
    /// Folder that workspace-write opens for writing [default: the client's first root, else the current directory]
    #[arg(long, value_name = "DIR")]
    workspace: Option<PathBuf>,
}

/// Serves until the client closes standard input.
///
/// # Errors
/// [`ClientError::Local`] when the peer does not speak the protocol.
pub(crate) fn run(args: &McpArgs, endpoint: &Endpoint) -> Result<u8, ClientError> {
    let failed = |what: &str, error: std::io::Error| ClientError::Local(format!("{what}: {error}"));
    let workspace = args.workspace.as_ref().map(std::path::absolute).transpose();
    let settings = Settings {
        endpoint: endpoint.clone(),
        mode: args.mode,
        workspace: workspace.map_err(|error| failed("cannot use the workspace", error))?,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| failed("cannot start", error))?;
    let outcome = runtime.block_on(mcp::serve(settings));
    // A read of standard input cannot be cancelled, and nothing is left to do for it.
    runtime.shutdown_background();
    outcome.map(|()| 0)
}
