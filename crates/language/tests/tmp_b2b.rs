use antiphon_language::library::{ALGORITHMS, Setting};
use antiphon_plan::verify::{Memory, Options as Proof, verify};
#[test]
fn show() {
    for ranks in [2, 3, 4, 8, 16] {
        for a in ALGORITHMS { for inplace in [false, true] { for instances in [1, 2] {
            if inplace && !a.inplace { continue; }
            let mut s = Setting { inplace, ..Setting::new(ranks) };
            s.options.instances = instances;
            if a.nodes && ranks == 3 { s.nodes = 3; }
            let Ok(plan) = a.plan(&s) else { continue };
            for memory in [Memory::Host, Memory::Device] {
                let t = std::time::Instant::now();
                let r = verify(&plan, &Proof { memory, ..Proof::default() });
                let e = t.elapsed();
                println!("{:28} {ranks:2} {inplace:5} x{instances} {memory:?} {:5} {} {:?}", a.name, r.proved, r.back_to_back, e);
                if r.findings.len() > 0 { println!("   {r}"); }
            }
        }}}
    }
}
