
import torch,kullback
torch.manual_seed(0)
from kullback.cli import reference, bench
from kullback.divergences import DIVERGENCES
for form in ("probs","log_probs"):
    x,y=bench.make_inputs(4096,16384,torch.float32,form,"cuda")
    for k,d in DIVERGENCES.items():
        t=reference.truth(k,form,x,y,**d.parameters)
        o=kullback.divergence(x,y,k,form=form,reduction="none").double(); s=kullback.divergence(x,y,k,form=form).double()
        e=reference.rows(k,form,x,y,**d.parameters).double()
        print(form,k,'scalar %.1e rows worst %.1e rms %.1e | eager worst %.1e rms %.1e mean %.1e'%(abs(s-t.mean())/t.mean(),((o-t)/t).abs().max(),((o-t)/t).square().mean().sqrt(),((e-t)/t).abs().max(),((e-t)/t).square().mean().sqrt(),abs(e.mean()-t.mean())/t.mean()))
