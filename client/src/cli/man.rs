//! `dsh-exec man`: manual pages, made from the definitions that `--help` is made from.
use std::path::PathBuf;

use super::print;
use crate::error::ClientError;

const EXAMPLES: &str = "\
Examples:
  dsh-exec man | man -l -
  dsh-exec man --dir ~/.local/share/man/man1    dsh-exec.1, dsh-exec-run.1, ...";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ManArgs {
    /// Write the pages of every command here; the folder is made if it is missing
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Prints the page of `command`, or writes those of all its subcommands too.
///
/// # Errors
/// [`ClientError::Local`] when a page cannot be written.
pub(crate) fn run(args: &ManArgs, command: clap::Command) -> Result<u8, ClientError> {
    let failed = |error: std::io::Error| ClientError::Local(format!("cannot write the manual pages: {error}"));
    match &args.dir {
        Some(dir) => {
            std::fs::create_dir_all(dir).map_err(failed)?;
            clap_mangen::generate_to(command, dir).map_err(failed)?;
        }
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(command).render(&mut page).map_err(failed)?;
            print::print(&page)?;
        }
    }
    Ok(0)
}
