//! The executable `dsh-execd`; everything is in the library.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    dsh_execd::main()
}
