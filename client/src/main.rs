//! The executable `dsh-exec`; everything is in the library.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    dsh_client::cli::main()
}
