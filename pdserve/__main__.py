from pdserve.cli.commands import main

main()
