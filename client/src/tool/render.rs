//! stub
use dsh_policy::result::BashRunResult;
/// x
pub fn render_result(r:&BashRunResult,_e:bool)->String{ r.stdout.text.clone() }
