//! `dsh-exec completions`: a script for the user's shell.
use clap::Command;
use clap_complete::Shell;

use super::print;
use crate::error::ClientError;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  dsh-exec completions bash > ~/.local/share/bash-completion/completions/dsh-exec
  dsh-exec completions zsh > ~/.zfunc/_dsh-exec")]
pub(crate) struct CompletionsArgs {
    /// Which shell
    shell: Shell,
}

/// Prints the script.
///
/// # Errors
/// None at present; the type is that of every command.
pub(crate) fn run(args: &CompletionsArgs, mut command: Command) -> Result<u8, ClientError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "dsh-exec", &mut script);
    print::print(&script)?;
    Ok(0)
}
